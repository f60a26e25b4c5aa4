-- Tells a new master everything that its engine has claimed, in full.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term.
-- Returns {last claim number, requests left in the queue, add_held's entry of each claimed request...}; nil when the
--   master has lost the lease.
local engine, owner, term = unpack(ARGV)
if fenced(engine, owner, term) then
  return false
end
local time = now()
local reply = { call('HGET', ENGINE .. engine, 'last_claim'), call('ZCARD', WAITING) }
for _, id in ipairs(call('ZRANGE', CLAIMED .. engine, 0, -1)) do
  add_held(reply, id, time)
end
return reply
