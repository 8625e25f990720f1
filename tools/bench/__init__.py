"""The developers' benchmark: Cloche through HTTP under load, and its peers, in one run."""
