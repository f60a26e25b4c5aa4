-- Takes the first requests of the queue that fit into an engine, and passes by those that wait for another engine, which has
-- their prefix. An engine that decodes takes the first of those that were handed over, instead of the queue.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, the last claim number that the master heard of, how many requests to take at most, free
--   slots, all slots of the engine, 'CLASS ORDER ..' of requests that may give way beyond that, the last one first.
-- Returns {last claim number, slots that the engine must have free to claim again or 0, number of the engine's listeners
--   before, and after, add_held's entry of each request taken...}; nil when the master has lost the lease. The slots are
--   those of the first request that had to wait, or what an engine that is full now needs to ask for more.
--   When the master has not heard of the engine's last claim, an answer was lost: the reply then tells what was claimed
--   since, and nothing new is taken.
--
-- An engine that took all there is, and has room left, asks for more (`asking`), and gets a hint.
local PAGE = 16 -- ids read from the queue at once
local ABOUT = { 'max_tokens', 'upfront', 'new', 'tenant', 'losses', 'deadline', 'detach_at', 'lives', 'engines', 'submitted', 'queued_at',
  'claimed_at', 'attempt', 'endpoint', 'weights', 'mark', 'prefix_at', 'overtaken', 'class', 'handed_at', 'handed' } -- what is asked of a request in the queue
local engine, owner, term, heard, count, slots, total, last_ones = unpack(ARGV)
heard, count, slots, total = tonumber(heard), tonumber(count), tonumber(slots), tonumber(total)
if fenced(engine, owner, term) then
  return false
end
local held_key, time, reply = CLAIMED .. engine, now(), {}
local last, listeners = fields(ENGINE .. engine, 'last_claim', 'listeners')
local mine, finishing, decodes = taste(engine)
local QUEUE = decodes and HANDED or WAITING
last = tonumber(last)
local taken = { tokens = 0, slots = 0, bytes = 0, tenants = {} } -- what waits no more

-- Tells what was claimed after `heard`.
local function tell_unheard()
  for _, id in ipairs(call('ZRANGE', held_key, 0, -1)) do
    if (tonumber(call('HGET', REQUEST .. id, 'claim')) or 0) > heard then
      add_held(reply, id, time)
    end
  end
end

-- Moves one request from the queue to the engine. Its claim number is noted at the end, with the last of this call.
local function take(id, order, request)
  if #reply == 0 then
    last = math.max(last, number(call('HGET', POOL, 'claim')) - 1)
  end
  last = last + 1
  local key, claim = REQUEST .. id, int(last)
  local record, tokens = call('HGET', key, 'record'), call('GET', TOKENS .. id) or ''
  local from = #tokens / TOKEN_SIZE
  call('ZREM', QUEUE, id)
  if not decodes then -- else it waits for no place: `load` knows nothing of it
    taken.tokens, taken.slots = taken.tokens + math.max(request.new - from, 0), taken.slots + request.upfront
    taken.bytes = taken.bytes + #record
    local of_tenant = taken.tenants[request.tenant] or { slots = 0, requests = 0, bytes = 0 }
    of_tenant.slots, of_tenant.requests = of_tenant.slots + request.max_tokens, of_tenant.requests + 1
    of_tenant.bytes, taken.tenants[request.tenant] = of_tenant.bytes + #record, of_tenant
  end
  call('ZADD', held_key, order, id)
  -- `engines` has a line '<index of the first token> <engine>' for each claim. A claim that brought no token has the
  -- same index as the next one, and its line is replaced.
  local engines = ('\n' .. request.engines):gsub('\n' .. from .. ' [^\n]*\n$', '\n'):sub(2)
  engines = engines .. from .. ' ' .. engine .. '\n'
  local first = request.claimed_at == '0' and int(time) or request.claimed_at
  local weights = mine .. (request.weights:match('/.*') or '')
  call('HSET', key, 'state', 'claimed', 'claim', claim, 'engine', engine, 'engines', engines, 'claimed_at', first, 'taken_at', int(time),
    'weights', weights)
  if request.mark and not decodes then
    call('HSET', key, 'place', place_at(engine)) -- where those that begin alike find what it computes
  end
  call('HSET', LISTENERS .. engine, claim, listener_of(id, request.attempt, request.endpoint))
  reply[#reply + 1] =
    held_entry(id, claim, order, request.class, record, tokens, request.losses, request.deadline, request.submitted,
      request.queued_at, int(time), weights, request.prefix_at, request.overtaken, request.handed, time)
end

-- Notes what was taken: the last claim number, and what waits no more.
local function note_taken()
  if #reply > 0 then
    call('HSET', POOL, 'claim', int(last))
    call('HSET', ENGINE .. engine, 'last_claim', int(last))
    move_listeners(engine)
    local load = { 'tokens', -taken.tokens, 'slots', -taken.slots, 'bytes', -taken.bytes }
    for tenant, of_tenant in pairs(taken.tenants) do
      load[#load + 1], load[#load + 2] = 'tokens:' .. tenant, -of_tenant.slots
      load[#load + 1], load[#load + 2] = 'waiting:' .. tenant, -of_tenant.requests
      load[#load + 1], load[#load + 2] = 'bytes:' .. tenant, -of_tenant.bytes
    end
    add_load(unpack(load))
  end
end

-- Whether a request could no longer end before its deadline if it began now. Not known before the engine has told its
-- pace.
local function too_late(id, deadline, new, pace, length)
  return deadline ~= '' and pace and time + (new - committed(id)) * length * pace > tonumber(deadline)
end

-- Requests of the engine, the last in their order first, that may give way: each has its class and its order.
local yielding = {}
for class, order in last_ones:gmatch('(%d+) (%d+)') do
  yielding[#yielding + 1] = { class = tonumber(class), order = tonumber(order) }
end

-- Whether the last of them gives way to a request, which comes before it and has a higher class.
local function gives_way(class, order)
  local last = yielding[1]
  if last and order < last.order and class < last.class then
    table.remove(yielding, 1)
    return true
  end
end

-- Counts that a request was taken before these, which wait for another engine. Returns the first that no other one may
-- overtake.
local function overtake(passed)
  local first
  for _, one in ipairs(passed) do
    local times = call('HINCRBY', REQUEST .. one.id, 'overtaken', 1)
    first = first or (times >= OVERTAKINGS and one or nil)
  end
  return first
end

-- Takes requests from the head of the queue until one of them must wait, or was overtaken by as many as may. Returns the
-- slots that the engine must have free to claim again, or 0 where it asks for more; and, where a request waits for them, what
-- it is tied to, and the engine that it waits for.
local function walk_queue()
  -- While more wait than have room on all engines, nothing is begun that cannot end in time: its place is another's.
  local waiting, crowded = call('ZCARD', QUEUE), false
  if waiting > count and not decodes then
    local mean = (tonumber(call('HGET', LOAD, 'slots')) or waiting) / waiting
    crowded = waiting > recent_capacity(mean, time)
  end
  local pace = crowded and tonumber(call('HGET', ENGINE .. engine, 'pace'))
  local length = tonumber(call('HGET', POOL, 'length')) or 1
  local held = call('ZRANGE', held_key, 0, 1)
  -- A suspect runs alone, so where the engine holds one it holds nothing else.
  local alone = #held == 1 and (tonumber(call('HGET', REQUEST .. held[1], 'losses')) or 0) >= SUSPECT_LOSSES
  local there -- looked up where a request needs it
  local empty, stay, passed = #held == 0, 0, {} -- stay: how many were looked at and stay in the queue
  while true do
    local page = call('ZRANGE', QUEUE, stay, stay + PAGE - 1, 'WITHSCORES') -- by rank: two may have one order
    for i = 1, #page, 2 do
      local id, order = page[i], page[i + 1]
      stay = stay + 1
      local request = named(REQUEST .. id, ABOUT)
      if not request.max_tokens then
        call('ZREM', QUEUE, id) -- Redis has evicted the record
        stay = stay - 1
        request.max_tokens, request.upfront, request.losses = math.huge, 0, 0
      end
      local size, upfront = tonumber(request.max_tokens), tonumber(request.upfront)
      local suspect = tonumber(request.losses) >= SUSPECT_LOSSES
      local reason = overdue(request.deadline, request.detach_at, request.lives, time)
        or (request.new and too_late(id, request.deadline, request.new, pace, length) and REASON.DEADLINE)
      if reason then
        end_early(id, reason, committed(id))
        stay = stay - 1
      elseif decodes and request.new and not kept(request.handed_at, request.queued_at, time) then
        there = there or weights_there()
        begin_again(id, there)
        stay = stay - 1
      -- A larger request is left to a larger engine, and one with tokens or an adapter to an engine that has what made them, or
      -- the adapter.
      elseif size <= total and suits(tied_to(id, request.weights), engine, mine, finishing) then
        local only = not decodes and awaited(request.prefix_at, request.overtaken, request.queued_at)
        if only and only ~= engine then
          passed[#passed + 1] = { id = id, upfront = upfront, tied = tied_to(id, request.weights) }
        elseif alone or (suspect and not empty) then
          return total, tied_to(id, request.weights), only
        elseif upfront > slots or (count == 0 and not gives_way(tonumber(request.class), tonumber(order))) then
          return upfront, tied_to(id, request.weights), only
        else
          take(id, order, request)
          count, slots, alone, empty, stay = math.max(count - 1, 0), slots - upfront, suspect, false, stay - 1
          local first = overtake(passed)
          if first then
            return first.upfront, first.tied
          end
        end
      end
    end
    if #page < 2 * PAGE then
      if count > 0 and slots > 0 and not alone then
        call('ZADD', ASKING, slots, engine)
        return 0
      end
      return alone and total or 1
    end
  end
end

local needs, waits, only
if heard < last then
  tell_unheard()
  needs = head_needs(engine)
else
  call('ZREM', ASKING, engine)
  needs, waits, only = walk_queue()
  note_taken()
  if waits then
    hint_waiting(needs, waits, only, decodes) -- another engine may have room for it
  end
end
local moved = #reply > 0 and call('HGET', ENGINE .. engine, 'listeners') or listeners
return { int(last), needs, listeners or '', moved or '', unpack(reply) }
