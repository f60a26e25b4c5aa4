-- Everything that an engine has claimed, in full. ARGV: engine, owner, term.
-- Returns {last claim, left in the queue, {add_held}...}; nil when the lease is another's.
local engine, owner, term = ARGV[1], ARGV[2], ARGV[3]
if fenced(engine, owner, term) then
  return false
end
local time = now()
local reply = { call('HGET', ENGINE .. engine, 'last_claim'), call('ZCARD', WAITING) }
for _, id in ipairs(call('ZRANGE', CLAIMED .. engine, 0, -1)) do
  add_held(reply, id, time)
end
return reply
