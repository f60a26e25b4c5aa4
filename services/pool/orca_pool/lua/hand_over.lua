-- Notes that an endpoint is leaving.
--
-- KEYS: the pool hash.
-- ARGV: the endpoint's incarnation.
-- Returns how many others stay: its clients can go there. One whose last renewal is a while ago may be dead, though its
-- lease is not over.
if registered(ARGV[1]) then
  call('HSET', ENDPOINT .. ARGV[1], 'leaving', 1)
end
local others = 0
for _, endpoint in ipairs(call('ZRANGEBYSCORE', ENDPOINTS, '(' .. int(now() - SWEEP_GAP), '+inf')) do
  if endpoint ~= ARGV[1] and call('HEXISTS', ENDPOINT .. endpoint, 'leaving') == 0 then
    others = others + 1
  end
end
return others
