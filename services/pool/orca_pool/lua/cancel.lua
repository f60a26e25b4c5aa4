-- Ends a request at once; its engine frees it when it hears of it.
-- ARGV: id. Returns 1: it was alive, 0: it had ended, nil: unknown.
local id = ARGV[1]
local state = call('HGET', REQUEST .. id, 'state')
if not state then
  return false
end
if state == 'ended' then
  return 0
end
end_early(id, CANCELLED, committed(id))
return 1
