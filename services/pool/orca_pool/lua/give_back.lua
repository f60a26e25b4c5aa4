-- Returns claimed requests to the queue, each to its old place.
-- ARGV: engine, owner, term, then per row: id, claim, '1' when it was RUNNING at a loss of its ranks.
-- A loss counts, and the count starts again when a token was committed since the last one; the third ends the request.
local engine = ARGV[1]
if fenced(engine, ARGV[2], ARGV[3]) then
  return
end
for i = 4, #ARGV, 3 do
  local id = ARGV[i]
  local key = REQUEST .. id
  local r = call('HMGET', key, 'claim', 'engine', 'arrival', 'losses', 'loss_at')
  if r[1] == ARGV[i + 1] and r[2] == engine then
    local losses = tonumber(r[4])
    if ARGV[i + 2] == '1' then
      local count = committed(id)
      losses = count > tonumber(r[5]) and 1 or losses + 1
      call('HSET', key, 'losses', losses, 'loss_at', count)
    end
    if losses >= 3 then
      end_early(id, INTERNAL, committed(id))
    else
      call('ZREM', CLAIMED .. engine, id)
      call('ZADD', WAITING, r[3], id)
      call('HSET', key, 'state', 'waiting', 'claim', '', 'engine', '')
    end
  end
end
hint_waiting()
