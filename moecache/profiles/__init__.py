"""What earlier runs found out, in a file, and what is made of it."""
