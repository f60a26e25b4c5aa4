-- Lists the engines that have formed.
--
-- KEYS: the pool hash.
-- ARGV: none.
-- Returns {engine, tensor parallel, pipeline parallel, slots, epoch, weights, policy, role} for each.
local reply = {}
local formed = call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE', 'WITHSCORES')
for i = 1, #formed, 2 do
  local tp, pp, epoch, weights, policy, role = fields(ENGINE .. formed[i], 'tp', 'pp', 'epoch', 'weights', 'policy', 'role')
  reply[#reply + 1] = { formed[i], tp, pp, formed[i + 1], epoch, weights or '', policy or '', role or '' }
end
return reply
