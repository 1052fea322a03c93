"""Host loops that moecache plugs into; each module needs its host installed."""
