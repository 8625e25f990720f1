"""`make soak`: a mixed load on a real server, with faults, and a search for whatever is left over or got lost."""
