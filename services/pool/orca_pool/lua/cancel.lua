-- Ends a request at once. The engine that holds it frees it when it hears of the end.
--
-- KEYS: the pool hash.
-- ARGV: request id.
-- Returns 1 when the request was alive, 0 when it had ended, nil when it is unknown.
local id = ARGV[1]
local state = call('HGET', REQUEST .. id, 'state')
if not state then
  return false
end
if state == 'ended' then
  return 0
end
end_early(id, REASON.CANCELLED, committed(id))
return 1
