-- Nobody listens any more; without a newer call the request ends after the grace.
-- ARGV: id, attempt, grace (microseconds).
-- An attempt that is not attached yet counts as attached and detached: its attach may still come, and is then refused.
local id, attempt, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local key = REQUEST .. id
local r = call('HMGET', key, 'state', 'attempt', 'endpoint', 'deadline')
if not r[1] or r[1] == 'ended' or attempt < tonumber(r[2]) then
  return
end
if attempt > tonumber(r[2]) then
  supersede(id, r[3], r[2])
end
local detach_at = int(now() + grace)
call('HSET', key, 'attempt', ARGV[2], 'endpoint', '', 'closed', 1, 'detach_at', detach_at)
if grace == 0 then
  end_early(id, DETACHED, committed(id))
else
  set_due(id, r[4], detach_at)
end
