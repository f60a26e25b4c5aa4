"""A call: the stream of one request to one client, its line in the log and its span; whichever door it came by."""
