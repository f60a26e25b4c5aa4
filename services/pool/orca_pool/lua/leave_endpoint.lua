-- The end of an endpoint. ARGV: incarnation.
remove_endpoint(ARGV[1])
