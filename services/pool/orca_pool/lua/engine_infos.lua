-- Lists the engines that have formed.
--
-- KEYS: the pool hash.
-- ARGV: none.
-- Returns {engine, tensor parallel, pipeline parallel, slots, epoch} for each.
local reply = {}
for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
  local tp, pp, slots, epoch = fields(ENGINE .. engine, 'tp', 'pp', 'slots', 'epoch')
  if tonumber(slots) > 0 then
    reply[#reply + 1] = { engine, tp, pp, slots, epoch }
  end
end
return reply
