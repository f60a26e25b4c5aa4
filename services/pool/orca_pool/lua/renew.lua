-- A master's renewal: what it says of its engine, and what the pool says that the engine holds.
-- ARGV: engine, owner, term, then each or '': epoch, reserve, slots, tensor parallel, pipeline parallel.
-- Returns {epoch, reserved, last claim, {id, claim}...}; nil when the lease is another's.
local engine, owner, term = ARGV[1], ARGV[2], ARGV[3]
if fenced(engine, owner, term) then
  return false
end
local key = ENGINE .. engine
local g = call('HMGET', key, 'epoch', 'reserved')
call('HINCRBY', key, 'counter', 1)
if ARGV[4] ~= '' then
  call('HSET', key, 'epoch', int(math.max(tonumber(ARGV[4]), tonumber(g[1]))))
end
if ARGV[5] ~= '' then
  call('HSET', key, 'reserved', int(math.max(tonumber(ARGV[5]), tonumber(g[2]))))
end
if ARGV[6] ~= '' then
  call('HSET', key, 'slots', ARGV[6], 'tp', ARGV[7], 'pp', ARGV[8])
  call('HSET', POOL, 'slots', math.max(tonumber(ARGV[6]), tonumber(call('HGET', POOL, 'slots')) or 0))
end
g = call('HMGET', key, 'epoch', 'reserved', 'last_claim')
local reply = { g[1], g[2], g[3] }
for _, id in ipairs(call('ZRANGE', CLAIMED .. engine, 0, -1)) do
  reply[#reply + 1] = { id, call('HGET', REQUEST .. id, 'claim') }
end
return reply
