-- Deletes an engine that has no ranks and holds nothing. ARGV: engine, owner, term.
local engine, owner, term = ARGV[1], ARGV[2], ARGV[3]
if fenced(engine, owner, term) or call('ZCARD', CLAIMED .. engine) > 0 then
  return
end
local reserved = tonumber(call('HGET', ENGINE .. engine, 'reserved'))
call('HSET', POOL, 'reserved', int(math.max(reserved, tonumber(call('HGET', POOL, 'reserved')) or 0)))
call('SREM', ENGINES, engine)
call('DEL', ENGINE .. engine, CONTROL .. engine)
