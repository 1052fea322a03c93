"""Hooks of MkDocs: the start page is README.md, and files of the repository can be linked."""
