-- Records that nobody listens to a request any more. It ends after the grace, unless a newer call is attached.
--
-- KEYS: the pool hash.
-- ARGV: request id, attempt, grace (microseconds; 0 ends the request at once).
-- Returns nil.
--
-- A detach may overtake the attach of its own attempt. It then closes that attempt, so that the late attach is refused.
local id, attempt, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local key = REQUEST .. id
local state, attached, endpoint, deadline = fields(key, 'state', 'attempt', 'endpoint', 'deadline')
if not state or state == 'ended' or attempt < tonumber(attached) then
  return
end
if attempt > tonumber(attached) then
  supersede(id, endpoint, attached)
end
local detach_at = int(now() + grace)
call('HSET', key, 'attempt', ARGV[2], 'endpoint', '', 'closed', 1, 'detach_at', detach_at)
if grace == 0 then
  end_early(id, REASON.DETACHED, committed(id))
else
  set_due(id, deadline, detach_at)
end
