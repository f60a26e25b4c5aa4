-- Lists what the engines that have formed hold, and what they have room for.
--
-- KEYS: the pool hash.
-- ARGV: none.
-- Returns {engine, requests that it has claimed, requests that it can run at a time, free slots, slots} for each. One
--   that begins nothing now, because it finishes or is not up, can run none.
local reply = {}
local formed = call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE', 'WITHSCORES')
for i = 1, #formed, 2 do
  local rows, free = fields(ENGINE .. formed[i], 'rows', 'free')
  reply[#reply + 1] = { formed[i], call('ZCARD', CLAIMED .. formed[i]), rows or 0, free or 0, formed[i + 1] }
end
return reply
