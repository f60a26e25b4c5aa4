-- The head of every script: names of keys, time and numbers, and the changes that several operations share.
-- KEYS[1] is the `pool` hash; all other keys have its prefix, and so its hash tag (keys.py is the table of them).
-- scripts.py puts the constants above this text: LEASE, SWEEP_GAP (microseconds), RETENTION (milliseconds),
-- DELIVERY_LENGTH, CONTROL_LENGTH (entries).

local call = redis.call
local POOL = KEYS[1]
local PREFIX = POOL:sub(1, -5)
local WAITING, DUE = PREFIX .. 'waiting', PREFIX .. 'due'
local ENGINES, ENDPOINTS, SCHEDULERS = PREFIX .. 'engines', PREFIX .. 'endpoints', PREFIX .. 'schedulers'
local REQUEST, TOKENS, CLAIMED = PREFIX .. 'request:', PREFIX .. 'tokens:', PREFIX .. 'claimed:'
local ENGINE, ENDPOINT = PREFIX .. 'engine:', PREFIX .. 'endpoint:'
local DELIVERY, CONTROL = PREFIX .. 'delivery:', PREFIX .. 'control:'

-- records.Reason and records.Refusal
local STOP, CANCELLED, DEADLINE, DETACHED, INTERNAL, LARGER, ABORTED = 4, 5, 6, 7, 8, 9, 10
local UNREGISTERED, STALE, UNKNOWN, OTHER_BODY, FULL, NEVER_FITS, NO_ENGINE = 1, 2, 3, 4, 5, 6, 7

-- Microseconds. The only clock of the pool.
local function now()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Lua numbers are doubles, exact for integers below 2^53; `..` alone would write 14 digits.
local function int(value)
  return string.format('%.0f', value)
end

-- A number that was never given before, even by a Redis that lost its last second.
local function number(last)
  return math.max((tonumber(last) or 0) + 1, now())
end

-- Whether `owner` does not hold the engine's lease with this term (any more).
local function fenced(engine, owner, term)
  local lease = call('HMGET', ENGINE .. engine, 'owner', 'term')
  return lease[1] ~= owner or lease[2] ~= term
end

local function committed(id)
  return call('STRLEN', TOKENS .. id) / 16
end

-- The moment at which something must happen to a request: the earlier of two, each '' when there is none.
local function set_due(id, deadline, detach_at)
  local at = math.min(tonumber(deadline) or math.huge, tonumber(detach_at) or math.huge)
  if at < math.huge then
    call('ZADD', DUE, int(at), id)
  else
    call('ZREM', DUE, id)
  end
end

-- Why a request must end by time, or nil.
local function overdue(deadline, detach_at, time)
  if time >= (tonumber(deadline) or math.huge) then
    return DEADLINE
  end
  return time >= (tonumber(detach_at) or math.huge) and DETACHED or nil
end

local function hint(engine, text)
  call('XADD', CONTROL .. engine, 'MAXLEN', CONTROL_LENGTH, '*', 'h', text)
end

-- Requests wait in the queue: every engine may want to claim.
local function hint_waiting()
  for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
    hint(engine, '')
  end
end

-- The end of a request as packets carry it (wire.py reads it).
local function finish_part(reason, output, submitted, claimed, first_token, finished)
  return struct.pack('<BIdddd', reason, output, submitted, claimed, first_token, finished)
end

-- A packet for one call (wire.py reads it). tokens: their 16-byte form; finish: finish_part or ''.
local function packet(id, attempt, first, tokens, finish)
  return struct.pack('<HdIIB', #id, attempt, first, #tokens / 16, #finish) .. id .. tokens .. finish
end

-- One numbered entry for an endpoint. Nobody but the endpoint creates its stream: a dead one's is not made again.
local function deliver(endpoint, engine, packets)
  local key = ENDPOINT .. endpoint
  local n = (tonumber(call('HGET', key, 'entries')) or 0) + 1
  local added = call('XADD', DELIVERY .. endpoint, 'NOMKSTREAM', 'MAXLEN', DELIVERY_LENGTH, '*',
    'n', n, 'e', engine, 'p', packets)
  if added then
    call('HSET', key, 'entries', n)
  end
end

-- Ends a record with `final` tokens, wherever it is, and answers the finish part of its packet.
local function close(id, reason, final)
  local key, time = REQUEST .. id, now()
  local r = call('HMGET', key, 'engine', 'submitted', 'claimed_at', 'first_token')
  call('ZREM', r[1] == '' and WAITING or CLAIMED .. r[1], id)
  call('ZREM', DUE, id)
  call('HSET', key, 'state', 'ended', 'reason', reason, 'final', final, 'finished', int(time),
    'claim', '', 'engine', '')
  call('PEXPIRE', key, RETENTION)
  call('PEXPIRE', TOKENS .. id, RETENTION)
  return finish_part(reason, final, r[2], r[3], r[4], time)
end

-- Ends a request outside of a commit: its call gets a packet, its engine a hint.
local function end_early(id, reason, final)
  local r = call('HMGET', REQUEST .. id, 'engine', 'endpoint', 'attempt')
  local finish = close(id, reason, final)
  if r[2] ~= '' then
    deliver(r[2], '', packet(id, r[3], final, '', finish))
  end
  if r[1] ~= '' then
    hint(r[1], id)
  end
end

-- Tells an older call that a newer one took its request over.
local function supersede(id, endpoint, attempt)
  if endpoint ~= '' then
    deliver(endpoint, '', packet(id, attempt, 0, '', finish_part(ABORTED, 0, 0, 0, 0, 0)))
  end
end

local function registered(endpoint)
  return call('ZSCORE', ENDPOINTS, endpoint)
end

local function remove_endpoint(endpoint)
  if call('ZREM', ENDPOINTS, endpoint) == 1 then
    call('HSET', POOL, 'orphans', 1) -- its calls are found by the next sweep
  end
  call('DEL', ENDPOINT .. endpoint, DELIVERY .. endpoint)
end

-- Makes a call the one listener of a known request. The endpoint is registered.
-- Answers a refusal, or {record, position, tokens, engines, reason, final, submitted, claimed, first token, finished}.
local function attach(id, endpoint, attempt)
  local key = REQUEST .. id
  local r = call('HMGET', key, 'attempt', 'closed', 'endpoint', 'deadline', 'state', 'final')
  local mine, theirs = tonumber(attempt), tonumber(r[1])
  if mine < theirs or (mine == theirs and r[2] == '1') then
    return STALE
  end
  if mine ~= theirs then
    supersede(id, r[3], theirs)
  end
  call('HSET', key, 'endpoint', endpoint, 'attempt', attempt, 'closed', 0, 'detach_at', '')
  local tokens = call('GET', TOKENS .. id) or ''
  local position = 0
  if r[5] == 'ended' then
    tokens = tokens:sub(1, r[6] * 16)
  else
    set_due(id, r[4], '')
    position = (call('ZRANK', WAITING, id) or -1) + 1
  end
  local rest = call('HMGET', key, 'engines', 'reason', 'final', 'submitted', 'claimed_at', 'first_token', 'finished')
  return { call('HGET', key, 'record'), position, tokens, unpack(rest) }
end

-- Appends a claimed request to a reply:
-- {id, claim, arrival, record, tokens, losses, microseconds to its deadline or '', submitted}.
local function add_held(reply, id, time)
  local r = call('HMGET', REQUEST .. id, 'claim', 'arrival', 'record', 'losses', 'deadline', 'submitted')
  local left = r[5] == '' and '' or int(r[5] - time)
  reply[#reply + 1] = { id, r[1], r[2], r[3], call('GET', TOKENS .. id) or '', r[4], left, r[6] }
end
