"""A sandbox from its creation to its end, with its files, network and volumes."""
