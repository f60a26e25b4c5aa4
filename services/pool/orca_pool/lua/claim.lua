-- Takes the oldest requests that fit, first come first served over all engines.
-- ARGV: engine, owner, term, the last claim number its master heard, how many, free slots, all slots of the engine,
-- slots of a block: a request takes whole blocks.
-- Returns {last claim, left in the queue, {add_held}...}; nil when the lease is another's.
local PAGE = 16 -- ids read from the queue at once
local engine, owner, term, have = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local count, slots, total, block = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if fenced(engine, owner, term) then
  return false
end
local mine, time, ids = CLAIMED .. engine, now(), {}
local last = tonumber(call('HGET', ENGINE .. engine, 'last_claim'))

-- What was claimed since `have`: an answer was lost.
local function unheard()
  for _, id in ipairs(call('ZRANGE', mine, 0, -1)) do
    if tonumber(call('HGET', REQUEST .. id, 'claim')) > have then
      ids[#ids + 1] = id
    end
  end
end

local function give(id, arrival, engines)
  last = math.max(last + 1, number(call('HGET', POOL, 'claim')))
  call('HSET', POOL, 'claim', int(last))
  call('HSET', ENGINE .. engine, 'last_claim', int(last))
  call('ZREM', WAITING, id)
  call('ZADD', mine, arrival, id)
  -- A line '<index of the first token> <engine>' a claim; one that brought no token gives way to the next.
  local from = committed(id)
  engines = ('\n' .. engines):gsub('\n' .. from .. ' [^\n]*\n$', '\n'):sub(2) .. from .. ' ' .. engine .. '\n'
  call('HSET', REQUEST .. id, 'state', 'claimed', 'claim', int(last), 'engine', engine, 'engines', engines)
  ids[#ids + 1] = id
end

-- Walks the queue from its head until something must wait.
local function take()
  local held = call('ZRANGE', mine, 0, 1)
  -- A request that was lost with its engine twice runs alone: then it is all that is claimed.
  local alone = #held == 1 and tonumber(call('HGET', REQUEST .. held[1], 'losses')) >= 2
  local empty, after = #held == 0, '-inf'
  while true do
    local page = call('ZRANGEBYSCORE', WAITING, after, '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
    for i = 1, #page, 2 do
      local id, arrival = page[i], page[i + 1]
      local r = call('HMGET', REQUEST .. id, 'need', 'losses', 'deadline', 'detach_at', 'engines', 'claimed_at')
      local need, suspect = math.ceil(r[1] / block) * block, tonumber(r[2]) >= 2
      local reason = overdue(r[3], r[4], time)
      if reason then
        end_early(id, reason, committed(id))
      elseif need <= total then -- a larger one is for a larger engine
        if alone or count == 0 or need > slots or (suspect and not empty) then
          return
        end
        give(id, arrival, r[5])
        if r[6] == '0' then
          call('HSET', REQUEST .. id, 'claimed_at', int(time))
        end
        count, slots, alone, empty = count - 1, slots - need, suspect, false
      end
      after = '(' .. arrival
    end
    if #page < 2 * PAGE then
      return
    end
  end
end

if have < last then
  unheard()
else
  take()
end
local reply = { int(last), call('ZCARD', WAITING) }
for _, id in ipairs(ids) do
  add_held(reply, id, time)
end
return reply
