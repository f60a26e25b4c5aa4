-- Frees an engine's lease, so that another scheduler can take the engine at once.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term.
-- Returns nil.
local engine, owner, term = unpack(ARGV)
local owner_now, term_now, counter = lease(engine)
if owner_now == owner and term_now == term then
  set_lease(engine, '', term, counter)
  call('ZREM', ASKING, engine)
  call('ZREM', YIELDING, engine)
end
