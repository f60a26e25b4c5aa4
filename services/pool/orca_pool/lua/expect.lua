-- Has requests with tokens of an engine's weights wait for these, even when the engine has formed with others.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, for how long (microseconds).
-- Returns nil.
local engine, owner, term, wait = unpack(ARGV)
local weights = not fenced(engine, owner, term) and call('HGET', ENGINE .. engine, 'weights') or ''
if weights ~= '' then
  call('ZADD', EXPECTED, 'GT', int(now() + wait), weights)
end
