"""How good voice activity detection is: ours, its halves, and others, on one labelled set."""
