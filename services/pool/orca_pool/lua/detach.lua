-- Records that nobody listens to a request any more. It ends after the grace, unless a newer call is attached.
--
-- KEYS: the pool hash.
-- ARGV: request id, attempt, grace (microseconds; 0 ends the request at once) or '': the one that the request was
--   submitted with, the least grace.
-- Returns nil.
--
-- A detach may overtake the attach of its own attempt. It then closes that attempt, so that the late attach is refused.
local id, attempt = ARGV[1], tonumber(ARGV[2])
local key = REQUEST .. id
local state, attached, endpoint, deadline, submitted_grace, claim, engine =
  fields(key, 'state', 'attempt', 'endpoint', 'deadline', 'grace', 'claim', 'engine')
if not state or state == 'ended' or attempt < tonumber(attached) then
  return
end
if attempt > tonumber(attached) then
  supersede(id, endpoint, attached)
end
local grace = math.max(tonumber(ARGV[3] == '' and submitted_grace or ARGV[3]), tonumber(ARGV[4]))
local detach_at = int(now() + grace)
call('HSET', key, 'attempt', ARGV[2], 'endpoint', '', 'closed', 1, 'detach_at', detach_at, 'lives', int(grace))
set_listener(id, '', ARGV[2], endpoint, claim, engine)
if grace == 0 then
  end_early(id, REASON.DETACHED, committed(id))
else
  set_due(id, deadline, detach_at)
end
