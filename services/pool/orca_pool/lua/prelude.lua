-- The head of every script: names of keys, the clock, and the changes that several operations share.
--
-- KEYS[1] is always the `pool` hash. All other keys begin with the same prefix, so they lie on the same node of a
-- cluster; orca_pool/keys.py has the table of them. orca_pool/scripts.py writes the numbers that Lua shares with Python
-- above this text (LEASE, REASON, TOKEN_SIZE and so on).

local call = redis.call
local POOL = KEYS[1]
local PREFIX = POOL:sub(1, -5)
local WAITING, DUE = PREFIX .. 'waiting', PREFIX .. 'due'
local ENGINES, ENDPOINTS, SCHEDULERS = PREFIX .. 'engines', PREFIX .. 'endpoints', PREFIX .. 'schedulers'
local REQUEST, TOKENS, CLAIMED = PREFIX .. 'request:', PREFIX .. 'tokens:', PREFIX .. 'claimed:'
local TOPS, PROMPT = PREFIX .. 'tops:', PREFIX .. 'prompt:'
local ENGINE, ENDPOINT = PREFIX .. 'engine:', PREFIX .. 'endpoint:'
local DELIVERY, CONTROL = PREFIX .. 'delivery:', PREFIX .. 'control:'
local LOAD = PREFIX .. 'load'

-- A request that was lost with its engine so often is a suspect: it runs alone. At the third loss it ends.
local SUSPECT_LOSSES, FATAL_LOSSES = 2, 3

-- Over how many ended requests the mean of `length` goes: the part of its new tokens that a request really made.
local LENGTH_MEMORY = 32

-- The time in microseconds. This is the only clock of the pool.
local function now()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- An integer as text. Lua's numbers are doubles, and `..` alone would write 14 digits of them.
local function int(value)
  return string.format('%.0f', value)
end

-- The named fields of a hash, in this order; false for each that is missing.
local function fields(key, ...)
  return unpack(call('HMGET', key, ...))
end

-- A number that was never given before. The time makes that true even after Redis lost its last second.
local function number(last)
  return math.max((tonumber(last) or 0) + 1, now())
end

-- Whether an operation comes from an old master: `owner` no longer holds the engine's lease with this term.
local function fenced(engine, owner, term)
  local owner_now, term_now = fields(ENGINE .. engine, 'owner', 'term')
  return owner_now ~= owner or term_now ~= term
end

-- How many tokens of a request are committed.
local function committed(id)
  return call('STRLEN', TOKENS .. id) / TOKEN_SIZE
end

-- Notes when the sweep must look at a request: at its deadline or at the end of its detach grace, whichever is earlier.
-- Each is a moment, or '' for none.
local function set_due(id, deadline, detach_at)
  local at = math.min(tonumber(deadline) or math.huge, tonumber(detach_at) or math.huge)
  if at < math.huge then
    call('ZADD', DUE, int(at), id)
  else
    call('ZREM', DUE, id)
  end
end

-- The reason for which a request must end by now, or nil.
local function overdue(deadline, detach_at, time)
  if time >= (tonumber(deadline) or math.huge) then
    return REASON.DEADLINE
  end
  return time >= (tonumber(detach_at) or math.huge) and REASON.DETACHED or nil
end

-- Tells an engine's master the id of a request that ended early, or '': requests wait in the queue.
local function hint(engine, text)
  call('XADD', CONTROL .. engine, 'MAXLEN', CONTROL_LENGTH, '*', 'h', text)
end

-- Tells every engine's master that requests wait in the queue.
local function hint_waiting()
  for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
    hint(engine, '')
  end
end

-- Adds `n` to a count of `load`. A count that is 0 has no field.
local function add_load(field, n)
  if n ~= 0 and call('HINCRBY', LOAD, field, int(n)) == 0 then
    call('HDEL', LOAD, field)
  end
end

-- Counts a request in (sign 1) or out (-1) of the queue. `load` says how much waits: its new tokens, slots and bytes.
local function weigh(id, sign)
  local new, slots, tenant = fields(REQUEST .. id, 'new', 'max_tokens', 'tenant')
  add_load('tokens', sign * math.max((new or slots) - committed(id), 0))
  add_load('slots', sign * slots)
  add_load('bytes', sign * call('HSTRLEN', REQUEST .. id, 'record'))
  add_load('tokens:' .. (tenant or ''), sign * slots)
end

-- Puts a request into the queue, at its place.
local function enqueue(id, arrival)
  if call('ZADD', WAITING, arrival, id) == 1 then
    weigh(id, 1)
  end
end

-- Takes a request out of the queue.
local function dequeue(id)
  if call('ZREM', WAITING, id) == 1 then
    weigh(id, -1)
  end
end

-- What the queue says of a request behind `ahead` others, which have `tokens` new tokens and `slots` slots together (the
-- request's own slots among them). Returns the microseconds until it begins, and those from one of its tokens to the
-- next. Both are nil while no engine has told its pace; the first is 0 while there is room for all of them.
--
-- An engine runs as many requests at a time as it has rows, and as its slots hold. Each of them gets a token in each
-- `pace`, so `width / pace` tokens a second leave the queue once the first request has made room.
local function prediction(ahead, tokens, slots, time)
  local mean, room, rate, width, first = slots / (ahead + 1), 0, 0, 0, math.huge
  for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
    local rows, free, pace, room_at = fields(ENGINE .. engine, 'rows', 'free', 'pace', 'room_at')
    if rows and tonumber(rows) > 0 then
      local running = call('ZCARD', CLAIMED .. engine)
      local open = math.min(rows - running, math.floor(free / mean))
      room = room + math.max(open, 0)
      if tonumber(pace) > 0 then
        local wide = math.max(running + open, 1)
        rate, width, first = rate + wide / pace, width + wide, math.min(first, room_at - time)
      end
    end
  end
  if rate == 0 then
    return nil, nil
  end
  local length = tonumber(call('HGET', POOL, 'length')) or 1
  return room > ahead and 0 or math.max(first, 0) + tokens * length / rate, width / rate
end

-- The end of a request in its binary form (wire.FINISH).
local function finish_part(reason, output, submitted, claimed, first_token, finished)
  return struct.pack(FINISH, reason, output, submitted, claimed, first_token, finished)
end

-- A packet for one call (wire.PACKET). `tokens` and their `tops` are in their binary form; `finish` is a finish_part, or
-- ''.
local function packet(id, attempt, first, tokens, finish, tops)
  return struct.pack(PACKET, #id, attempt, first, #tokens / TOKEN_SIZE, #finish, #tops) .. id .. tokens .. finish .. tops
end

-- Writes one numbered entry into an endpoint's delivery stream. A stream that is gone is not made again: only its
-- endpoint creates it, and nobody reads a dead endpoint's.
local function deliver(endpoint, engine, packets)
  local key = ENDPOINT .. endpoint
  local n = (tonumber(call('HGET', key, 'entries')) or 0) + 1
  local added = call('XADD', DELIVERY .. endpoint, 'NOMKSTREAM', 'MAXLEN', DELIVERY_LENGTH, '*',
    'n', n, 'e', engine, 'p', packets)
  if added then
    call('HSET', key, 'entries', n)
  end
end

-- Ends the record of a request with `final` tokens, wherever the request is. Returns the finish_part of its packet.
local function end_record(id, reason, final)
  local key, time = REQUEST .. id, now()
  local engine, submitted, claimed_at, first_token, new, tenant =
    fields(key, 'engine', 'submitted', 'claimed_at', 'first_token', 'new', 'tenant')
  if engine == '' then
    dequeue(id)
  else
    call('ZREM', CLAIMED .. engine, id)
  end
  call('ZREM', DUE, id)
  add_load('requests:' .. (tenant or ''), -1)
  if new and tonumber(reason) <= REASON.STOP then -- the request said itself when it was done
    local length = tonumber(call('HGET', POOL, 'length')) or 1
    call('HSET', POOL, 'length', length + (final / new - length) / LENGTH_MEMORY)
  end
  call('HSET', key, 'state', 'ended', 'reason', reason, 'final', final, 'finished', int(time),
    'claim', '', 'engine', '')
  call('PEXPIRE', key, RETENTION)
  call('PEXPIRE', TOKENS .. id, RETENTION)
  call('PEXPIRE', TOPS .. id, RETENTION)
  call('PEXPIRE', PROMPT .. id, RETENTION)
  return finish_part(reason, final, submitted, claimed_at, first_token, time)
end

-- Ends a request outside of a commit: its call gets a packet, and its engine a hint.
local function end_early(id, reason, final)
  local engine, endpoint, attempt = fields(REQUEST .. id, 'engine', 'endpoint', 'attempt')
  local finish = end_record(id, reason, final)
  if endpoint ~= '' then
    deliver(endpoint, '', packet(id, attempt, final, '', finish, ''))
  end
  if engine ~= '' then
    hint(engine, id)
  end
end

-- Tells the older call of a request that a newer one took over.
local function supersede(id, endpoint, attempt)
  if endpoint ~= '' then
    deliver(endpoint, '', packet(id, attempt, 0, '', finish_part(REASON.ABORTED, 0, 0, 0, 0, 0), ''))
  end
end

-- Whether an endpoint's incarnation is registered.
local function registered(endpoint)
  return call('ZSCORE', ENDPOINTS, endpoint)
end

-- Deletes an endpoint's registration and stream. The next sweep finds its orphaned calls.
local function remove_endpoint(endpoint)
  if call('ZREM', ENDPOINTS, endpoint) == 1 then
    call('HSET', POOL, 'orphaned_calls', 1)
  end
  call('DEL', ENDPOINT .. endpoint, DELIVERY .. endpoint)
end

-- The tokens from which a call that has `known` of them goes on, and the index of the first. A token names its
-- iteration, so the last one that the call has proves those before it. Where the pool has another one, or fewer, the
-- call gets all.
local function tokens_after(id, known, last, count)
  local first = 0
  if known > 0 and known <= count
    and call('GETRANGE', TOKENS .. id, (known - 1) * TOKEN_SIZE, known * TOKEN_SIZE - 1) == last then
    first = known
  end
  if first == count then
    return '', first
  end
  return call('GETRANGE', TOKENS .. id, first * TOKEN_SIZE, count * TOKEN_SIZE - 1), first
end

-- The tops of tokens first .. count - 1; '' where they were not asked for. They are appended with their tokens, and all
-- are of one size.
local function tops_between(id, first, count)
  local size = call('STRLEN', TOPS .. id)
  if size == 0 or first == count then
    return ''
  end
  size = size / committed(id)
  return call('GETRANGE', TOPS .. id, first * size, count * size - 1)
end

-- Makes a call the one listener of a request. The request is known, and the endpoint registered. `known` and `last`: how
-- many tokens the call has, and the last of them.
-- Returns a number of REFUSAL, or
-- {record, position, microseconds until a waiting request begins or '', index of the first token, tokens, their tops, the
-- prompt's logprobs, engines, reason, final, submitted, claimed at, first token, finished}. Record and prompt's logprobs
-- are '' when the call has tokens: it has both.
local function attach(id, endpoint, attempt, known, last)
  local key = REQUEST .. id
  local attached, closed, listener, deadline, state, final =
    fields(key, 'attempt', 'closed', 'endpoint', 'deadline', 'state', 'final')
  local mine, theirs = tonumber(attempt), tonumber(attached)
  if mine < theirs or (mine == theirs and closed == '1') then
    return REFUSAL.STALE
  end
  if mine ~= theirs then
    supersede(id, listener, theirs)
  end
  call('HSET', key, 'endpoint', endpoint, 'attempt', attempt, 'closed', 0, 'detach_at', '')
  local position, starts_in, count = 0, nil, tonumber(final)
  if state ~= 'ended' then
    set_due(id, deadline, '')
    position = (call('ZRANK', WAITING, id) or -1) + 1
    count = committed(id)
  end
  if position > 0 then
    local waiting, tokens, slots = call('ZCARD', WAITING), fields(LOAD, 'tokens', 'slots')
    local ahead = (position - 1) / waiting -- a part of the whole queue
    starts_in = prediction(position - 1, ahead * (tokens or 0), position / waiting * slots, now())
  end
  local tokens, first = tokens_after(id, known, last, count)
  local record, prompt = '', ''
  if known == 0 then
    record, prompt = call('HGET', key, 'record'), call('GET', PROMPT .. id) or ''
  end
  return { record, position, starts_in and int(starts_in) or '', first, tokens, tops_between(id, first, count), prompt,
    fields(key, 'engines', 'reason', 'final', 'submitted', 'claimed_at', 'first_token', 'finished') }
end

-- Appends a claimed request to a reply:
-- {id, claim, arrival, record, tokens, losses, microseconds to its deadline or '', submitted}.
local function add_held(reply, id, time)
  local claim, arrival, record, losses, deadline, submitted =
    fields(REQUEST .. id, 'claim', 'arrival', 'record', 'losses', 'deadline', 'submitted')
  local left = deadline == '' and '' or int(deadline - time)
  reply[#reply + 1] = { id, claim, arrival, record, call('GET', TOKENS .. id) or '', losses, left, submitted }
end
