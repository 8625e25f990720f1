"""The benchmark: Cloche through its public library and through HTTP, against its peers, in one run."""
