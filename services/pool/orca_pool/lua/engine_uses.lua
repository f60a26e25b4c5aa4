-- Lists what the engines that have formed hold, and what they have room for.
--
-- KEYS: the pool hash.
-- ARGV: none.
-- Returns {engine, requests that it has claimed, requests that it can run at a time, free slots, slots, 1 while it
--   finishes} for each.
local reply = {}
local formed = call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE', 'WITHSCORES')
for i = 1, #formed, 2 do
  local rows, free, finishing = fields(ENGINE .. formed[i], 'rows', 'free', 'finishing')
  reply[#reply + 1] = { formed[i], call('ZCARD', CLAIMED .. formed[i]), rows or 0, free or 0, formed[i + 1], finishing or 0 }
end
return reply
