-- Tells a new master everything that its engine has claimed, in full.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term.
-- Returns {last claim number, slots that the head of the queue needs or 0, add_held's entry of each claimed request...};
--   nil when the master has lost the lease.
local engine, owner, term = unpack(ARGV)
if fenced(engine, owner, term) then
  return false
end
local time = now()
local reply = { call('HGET', ENGINE .. engine, 'last_claim'), head_needs(engine) }
for _, id in ipairs(call('ZRANGE', CLAIMED .. engine, 0, -1)) do
  if call('EXISTS', REQUEST .. id) == 1 then
    add_held(reply, id, time)
  else
    call('ZREM', CLAIMED .. engine, id) -- Redis has evicted the record
  end
end
return reply
