-- Deletes an engine that has no ranks any more. Does nothing while the engine has claims: they are given back first.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term.
-- Returns nil.
local engine, owner, term = unpack(ARGV)
if fenced(engine, owner, term) or call('ZCARD', CLAIMED .. engine) > 0 then
  return
end
-- An engine of this name may come back: it must not use an iteration number again.
local reserved = tonumber(call('HGET', ENGINE .. engine, 'reserved'))
call('HSET', POOL, 'reserved', int(math.max(reserved, tonumber(call('HGET', POOL, 'reserved')) or 0)))
call('HSET', POOL, 'shrunk', 0) -- its weights may be no engine's now: the sweep looks at the queue
call('ZREM', ENGINES, engine)
call('ZREM', ASKING, engine)
call('ZREM', YIELDING, engine)
call('HDEL', LEASES, engine)
call('DEL', ENGINE .. engine, CONTROL .. engine, HAS .. engine)
