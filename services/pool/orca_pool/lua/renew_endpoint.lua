-- Registers an endpoint's incarnation, or renews its registration.
--
-- KEYS: the pool hash.
-- ARGV: incarnation, '1' to register it if it is not registered, an older incarnation to remove or ''.
-- Returns the registration number; nil when the incarnation is not registered.
local endpoint, register, replaced = unpack(ARGV)
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
  -- Others write only to a stream that exists: make an empty one.
  call('XADD', DELIVERY .. endpoint, '*', 'n', 0)
  call('XTRIM', DELIVERY .. endpoint, 'MAXLEN', 0)
end
call('ZADD', ENDPOINTS, int(now()), endpoint)
return tonumber(call('HGET', ENDPOINT .. endpoint, 'number'))
