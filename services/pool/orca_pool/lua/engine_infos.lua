-- The engines that have formed. Returns {engine, tensor parallel, pipeline parallel, slots, epoch} each.
local reply = {}
for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
  local g = call('HMGET', ENGINE .. engine, 'tp', 'pp', 'slots', 'epoch')
  if tonumber(g[3]) > 0 then
    reply[#reply + 1] = { engine, g[1], g[2], g[3], g[4] }
  end
end
return reply
