-- Removes an endpoint that leaves: its registration and its delivery stream.
--
-- KEYS: the pool hash.
-- ARGV: the endpoint's incarnation.
-- Returns nil.
remove_endpoint(ARGV[1])
