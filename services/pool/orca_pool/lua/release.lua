-- Frees an engine's lease, so that another scheduler can take the engine at once.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term.
-- Returns nil.
local engine, owner, term = unpack(ARGV)
if not fenced(engine, owner, term) then
  call('HSET', ENGINE .. engine, 'owner', '')
end
