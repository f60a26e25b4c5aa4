-- Registers an endpoint's incarnation, or renews its registration.
--
-- KEYS: the pool hash.
-- ARGV: incarnation, '1' to register it if it is not registered, an older incarnation to remove or '', the number of the
--   last entry that was read from its stream: it and those before are deleted.
-- Returns the registration number; nil when the incarnation is not registered.
local endpoint, register, replaced, read = unpack(ARGV)
if replaced ~= '' then
  remove_endpoint(replaced)
end
if not registered(endpoint) then
  if register ~= '1' then
    return false
  end
  local registration = number(call('HGET', POOL, 'registration'))
  call('HSET', POOL, 'registration', int(registration))
  call('HSET', ENDPOINT .. endpoint, 'number', int(registration))
  -- Others write only to a stream that exists: make an empty one.
  call('XGROUP', 'CREATE', DELIVERY .. endpoint, 'none', 0, 'MKSTREAM')
  call('XGROUP', 'DESTROY', DELIVERY .. endpoint, 'none')
elseif read ~= '0' then
  call('XTRIM', DELIVERY .. endpoint, 'MINID', '0-' .. int(read + 1))
end
call('ZADD', ENDPOINTS, int(now()), endpoint)
return tonumber(call('HGET', ENDPOINT .. endpoint, 'number'))
