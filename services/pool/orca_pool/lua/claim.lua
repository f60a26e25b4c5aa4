-- Takes the oldest requests that fit into an engine: first come, first served over all engines.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, the last claim number that the master heard of, how many requests to take at most, free
--   slots, all slots of the engine, slots of a block (a request takes whole blocks).
-- Returns {last claim number, slots that the first request needs which had to wait, or 0, add_held's entry of each
--   request taken...}; nil when the master has lost the lease. When the master has not heard of the engine's last claim,
--   an answer was lost: the reply then tells what was claimed since, and nothing new is taken.
--
-- An engine that took all there is asks for more (`asking`), and gets a hint.
local PAGE = 16 -- ids read from the queue at once
local engine, owner, term, heard, count, slots, total, block = unpack(ARGV)
heard, count, slots = tonumber(heard), tonumber(count), tonumber(slots)
total, block = tonumber(total), tonumber(block)
if fenced(engine, owner, term) then
  return false
end
local held_key, time, ids = CLAIMED .. engine, now(), {}
local last = tonumber(call('HGET', ENGINE .. engine, 'last_claim'))

-- Collects what was claimed after `heard`.
local function collect_unheard()
  for _, id in ipairs(call('ZRANGE', held_key, 0, -1)) do
    if (tonumber(call('HGET', REQUEST .. id, 'claim')) or 0) > heard then
      ids[#ids + 1] = id
    end
  end
end

-- Moves one request from the queue to the engine.
local function take(id, arrival, engines)
  last = math.max(last + 1, number(call('HGET', POOL, 'claim')))
  call('HSET', POOL, 'claim', int(last))
  call('HSET', ENGINE .. engine, 'last_claim', int(last))
  dequeue(id)
  call('ZADD', held_key, arrival, id)
  -- `engines` has a line '<index of the first token> <engine>' for each claim. A claim that brought no token has the
  -- same index as the next one, and its line is replaced.
  local from = committed(id)
  engines = ('\n' .. engines):gsub('\n' .. from .. ' [^\n]*\n$', '\n'):sub(2) .. from .. ' ' .. engine .. '\n'
  call('HSET', REQUEST .. id, 'state', 'claimed', 'claim', int(last), 'engine', engine, 'engines', engines)
  local attempt, endpoint = fields(REQUEST .. id, 'attempt', 'endpoint')
  call('HSET', LISTENERS .. engine, int(last), attempt .. ' ' .. endpoint)
  ids[#ids + 1] = id
end

-- Whether a request could no longer end before its deadline if it began now. Not known before the engine has told its
-- pace.
local function too_late(id, deadline, new, pace, length)
  return deadline ~= '' and pace and time + (new - committed(id)) * length * pace > tonumber(deadline)
end

-- Takes requests from the head of the queue until one of them must wait. Returns the slots that this one needs, or 0.
local function walk_queue()
  -- While more wait than have room on all engines, nothing is begun that cannot end in time: its place is another's.
  local waiting, crowded = call('ZCARD', WAITING), false
  if waiting > count then
    local mean = (tonumber(call('HGET', LOAD, 'slots')) or waiting) / waiting
    crowded = waiting > recent_capacity(mean, time)
  end
  local pace = crowded and tonumber(call('HGET', ENGINE .. engine, 'pace'))
  local length = tonumber(call('HGET', POOL, 'length')) or 1
  local held = call('ZRANGE', held_key, 0, 1)
  -- A suspect runs alone, so where the engine holds one it holds nothing else.
  local alone = #held == 1 and (tonumber(call('HGET', REQUEST .. held[1], 'losses')) or 0) >= SUSPECT_LOSSES
  local empty, after = #held == 0, '-inf'
  while true do
    local page = call('ZRANGEBYSCORE', WAITING, after, '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
    for i = 1, #page, 2 do
      local id, arrival = page[i], page[i + 1]
      local max_tokens, losses, deadline, detach_at, engines, claimed_at, new =
        fields(REQUEST .. id, 'max_tokens', 'losses', 'deadline', 'detach_at', 'engines', 'claimed_at', 'new')
      if not max_tokens then
        call('ZREM', WAITING, id) -- Redis has evicted the record
        max_tokens, losses = math.huge, 0
      end
      local size, suspect = math.ceil(max_tokens / block) * block, tonumber(losses) >= SUSPECT_LOSSES
      local reason = overdue(deadline, detach_at, time)
        or (new and too_late(id, deadline, new, pace, length) and REASON.DEADLINE)
      if reason then
        end_early(id, reason, committed(id))
      elseif size <= total then -- a larger request is left to a larger engine
        if alone or (suspect and not empty) then
          return total
        elseif count == 0 or size > slots then
          return size
        end
        take(id, arrival, engines)
        if claimed_at == '0' then
          call('HSET', REQUEST .. id, 'claimed_at', int(time))
        end
        count, slots, alone, empty = count - 1, slots - size, suspect, false
      end
      after = '(' .. arrival
    end
    if #page < 2 * PAGE then
      if count > 0 and slots > 0 and not alone then
        call('ZADD', ASKING, slots, engine)
      end
      return 0
    end
  end
end

local needs
if heard < last then
  collect_unheard()
  needs = head_needs(engine)
else
  call('ZREM', ASKING, engine)
  needs = walk_queue()
  if needs > 0 then
    hint_waiting(needs) -- another engine may have room for it
  end
end
local reply = { int(last), needs }
for _, id in ipairs(ids) do
  add_held(reply, id, time)
end
return reply
