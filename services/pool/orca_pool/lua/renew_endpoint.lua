-- Registers or renews an endpoint incarnation, in place of another one.
-- ARGV: incarnation, '1' to register it, the incarnation that it replaces or ''.
-- Returns its registration number; nil when it is not registered.
local endpoint, register, replaced = ARGV[1], ARGV[2], ARGV[3]
if replaced ~= '' then
  remove_endpoint(replaced)
end
if not registered(endpoint) then
  if register ~= '1' then
    return false
  end
  local registration = number(call('HGET', POOL, 'registration'))
  call('HSET', POOL, 'registration', int(registration))
  call('HSET', ENDPOINT .. endpoint, 'number', int(registration), 'entries', 0)
  -- An empty stream: others write only to a stream that is there.
  call('XADD', DELIVERY .. endpoint, '*', 'n', 0)
  call('XTRIM', DELIVERY .. endpoint, 'MAXLEN', 0)
end
call('ZADD', ENDPOINTS, int(now()), endpoint)
return tonumber(call('HGET', ENDPOINT .. endpoint, 'number'))
