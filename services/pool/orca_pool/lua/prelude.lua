-- The head of every script: names of keys, the clock, and the changes that several operations share.
--
-- KEYS[1] is always the `pool` hash. All other keys begin with the same prefix, so they lie on the same node of a
-- cluster; orca_pool/keys.py has the table of them. orca_pool/scripts.py writes the numbers that Lua shares with Python
-- above this text (LEASE, REASON, TOKEN_SIZE and so on).

local call = redis.call
local POOL = KEYS[1]
local PREFIX = POOL:sub(1, -5)
local WAITING, DUE, ENDED = PREFIX .. 'waiting', PREFIX .. 'due', PREFIX .. 'ended'
local ENGINES, LEASES, ASKING = PREFIX .. 'engines', PREFIX .. 'leases', PREFIX .. 'asking'
local ENDPOINTS, ORPHANS, SCHEDULERS = PREFIX .. 'endpoints', PREFIX .. 'orphans', PREFIX .. 'schedulers'
local REQUEST, TOKENS, CLAIMED = PREFIX .. 'request:', PREFIX .. 'tokens:', PREFIX .. 'claimed:'
local TOPS, PROMPT = PREFIX .. 'tops:', PREFIX .. 'prompt:'
local ENGINE, ENDPOINT, CALLS = PREFIX .. 'engine:', PREFIX .. 'endpoint:', PREFIX .. 'calls:'
local LISTENERS = PREFIX .. 'listeners:'
local DELIVERY, CONTROL = PREFIX .. 'delivery:', PREFIX .. 'control:'
local LOAD, TAGS, PREFIXES, YIELDING = PREFIX .. 'load', PREFIX .. 'tags', PREFIX .. 'prefixes', PREFIX .. 'yielding'
local EXPECTED = PREFIX .. 'expected'
local HANDED = PREFIX .. 'handed'
local ADAPTERS, USES, HAS = PREFIX .. 'adapters', PREFIX .. 'uses:', PREFIX .. 'has:'

-- Another version of these scripts may still serve the release. Both must not write the same keys.
do
  local stands = call('HGET', POOL, 'schema')
  if not stands then
    call('HSET', POOL, 'schema', SCHEMA)
  elseif stands ~= SCHEMA then
    return redis.error_reply('SCHEMA ' .. stands)
  end
end

-- A request that was lost with its engine so often is a suspect: it runs alone. At the third loss it ends.
local SUSPECT_LOSSES, FATAL_LOSSES = 2, 3

-- So many requests of the queue are looked at for one that fits into an engine.
local LOOKED_AT = 16

-- Before a claim number in a hint. No id begins so (orca_pool/keys.py).
local LET_GO = '/'

-- Over how many ended requests the mean of `length` goes: the part of its new tokens that a request really made.
local LENGTH_MEMORY = 32

-- With more engines than FEW, what `prediction` sums up over them is kept for KEPT microseconds an engine: so it costs some
-- percent of Redis's time at most, however many requests are submitted.
local FEW, KEPT = 8, 250

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

-- The same as a table by their names.
local function named(key, names)
  local values, found = call('HMGET', key, unpack(names)), {}
  for i, name in ipairs(names) do
    found[name] = values[i]
  end
  return found
end

-- A number that was never given before. The time makes that true even after Redis lost its last second.
local function number(last)
  return math.max((tonumber(last) or 0) + 1, now())
end

-- An engine's lease: owner ('' when free), term and counter, as text; nil for an engine that is not known.
local function lease(engine)
  local text = call('HGET', LEASES, engine)
  if text then
    local counter, term, owner = text:match('^(%d+) (%d+) (.*)$')
    return owner, term, counter
  end
end

-- Writes an engine's lease.
local function set_lease(engine, owner, term, counter)
  call('HSET', LEASES, engine, counter .. ' ' .. term .. ' ' .. owner)
end

-- Whether an operation comes from an old master: `owner` no longer holds the engine's lease with this term.
local function fenced(engine, owner, term)
  local owner_now, term_now = lease(engine)
  return owner_now ~= owner or term_now ~= term
end

-- How many tokens of a request are committed.
local function committed(id)
  return call('STRLEN', TOKENS .. id) / TOKEN_SIZE
end

-- The ids of a request's first tokens, in their binary form.
local function ids_of(id, count)
  local token = '(' .. ('.'):rep(TOKEN_ID_SIZE) .. ')' .. ('.'):rep(TOKEN_SIZE - TOKEN_ID_SIZE) -- captures the id
  return count == 0 and '' or (call('GETRANGE', TOKENS .. id, 0, count * TOKEN_SIZE - 1):gsub(token, '%1'))
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

-- The moment at which clients could reach the pool again after the last outage: now, if no sweep has seen yet that there was one.
local function back_at(time)
  local swept, back = fields(POOL, 'swept', 'back')
  return time - (tonumber(swept) or 0) > LEASE and time or tonumber(back) or 0
end

-- The end of a detach grace of `lives` microseconds that was set to end at `detach_at`. It begins anew after an outage: no client
-- could come back before.
local function grace_end(detach_at, lives, time)
  return math.max(tonumber(detach_at), back_at(time) + (tonumber(lives) or 0))
end

-- The reason for which a request must end by now, or nil.
local function overdue(deadline, detach_at, lives, time)
  if time >= (tonumber(deadline) or math.huge) then
    return REASON.DEADLINE
  end
  local detached = time >= (tonumber(detach_at) or math.huge) and time >= grace_end(detach_at, lives, time)
  return detached and REASON.DETACHED or nil
end

-- Tells an engine's master the id of a request that ended early; or '': requests wait in the queue; or LET_GO and a claim number: the
-- keys and values that it keeps of this claim are not needed any more.
local function hint(engine, text)
  call('XADD', CONTROL .. engine, 'MAXLEN', CONTROL_LENGTH, '*', 'h', text)
end

-- What made a request's tokens: the weights, by their fingerprint, and behind a slash the adapter, if it has one. '' while it
-- has no token. `weights`: the request's field.
local function made_by(id, weights)
  return (weights or '') ~= '' and committed(id) > 0 and weights or ''
end

-- What a request is tied to: what made its tokens or, while it has none, its adapter behind a slash; '' for nothing.
local function tied_to(id, weights)
  local made = made_by(id, weights)
  return made == '' and (weights or ''):match('/.*') or made
end

-- The weights and the adapter of a tie, '' for none. A fingerprint has no slash.
local function parts_of(tied)
  return tied:match('^([^/]*)/?(.*)$')
end

-- Whether all ranks of an engine have an adapter.
local function has_adapter(engine, adapter)
  return (call('HGET', HAS .. engine, adapter) or ''):sub(1, 1) == '+'
end

-- Whether an engine that decodes may go on with what one that prefills begins with these weights: one that does not finish.
-- Where none has formed, they wait for one. Those that decode have the last names, so of engines of one size they come first.
local GONE_ON_WITH = {}
local function gone_on_with(mine)
  if GONE_ON_WITH[mine] == nil then
    local waited_for = true
    for _, engine in ipairs(call('ZRANGE', ENGINES, '+inf', 1, 'BYSCORE', 'REV')) do
      local weights, finishing, role = fields(ENGINE .. engine, 'weights', 'finishing', 'role')
      if role == 'decode' and weights == mine and finishing ~= '1' then
        GONE_ON_WITH[mine] = true
        return true
      end
      waited_for = waited_for and role ~= 'decode'
    end
    GONE_ON_WITH[mine] = waited_for
  end
  return GONE_ON_WITH[mine]
end

-- An id for an adapter of this name, which was never given before.
local function new_adapter_id(name)
  local last = int(number(call('HGET', POOL, 'adapter')))
  call('HSET', POOL, 'adapter', last)
  return name .. '@' .. last
end

-- Keeps the entry of an adapter, in its new state. A retired one is forgotten when no endpoint names it any more.
local function put_adapter(id, entry, state)
  local time = now()
  entry.state, entry.at = state, int(time)
  call('HSET', ADAPTERS, id, cjson.encode(entry))
  if state == 'retired' then
    call('HSET', POOL, 'retired', int(time + ADAPTER_GRACE))
  end
end

-- What an engine may take: its weights, whether it begins nothing, because it finishes or no engine would go on with it, and
-- whether it decodes: then it takes what another engine has handed over, and no other engine does.
local function taste(engine)
  local weights, finishing, role = fields(ENGINE .. engine, 'weights', 'finishing', 'role')
  weights = weights or ''
  return weights, finishing == '1' or (role == 'prefill' and not gone_on_with(weights)), role == 'decode'
end

-- Whether an engine with this taste, whose adapters count, may take a request with this tie.
local function suits(tied, engine, mine, finishing)
  local weights, adapter = parts_of(tied)
  return (weights == mine and mine ~= '' or (weights == '' and not finishing)) and (adapter == '' or has_adapter(engine, adapter))
end

-- For the weights of all engines that have formed and take from the queue, the slots of the largest one; where others decode,
-- no more than the largest of those with these weights has. Room for all where weights are expected back. nil where no engine
-- that takes from the queue has formed.
local function weights_there()
  local formed, sides = call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE', 'WITHSCORES'), {} -- those that decode, and the others
  for i = 1, #formed, 2 do
    local weights, role = fields(ENGINE .. formed[i], 'weights', 'role')
    local side = role == 'decode'
    sides[side] = sides[side] or {}
    sides[side][weights or ''] = tonumber(formed[i + 1]) -- the larger ones come later
  end
  local found, decoding = sides[false], sides[true]
  for weights, slots in pairs(decoding and found or {}) do
    found[weights] = math.min(slots, decoding[weights] or 0)
  end
  for _, weights in ipairs(found and call('ZRANGE', EXPECTED, 0, -1) or {}) do
    found[weights] = math.huge
  end
  return found
end

-- The slots of the largest request that the engines can run: one of each role must have them. nil where none has formed.
local function largest_there()
  local formed, first = call('ZRANGE', ENGINES, '+inf', 1, 'BYSCORE', 'REV', 'WITHSCORES'), nil
  for i = 1, #formed, 2 do
    local role = call('HGET', ENGINE .. formed[i], 'role') or ''
    first = first or role
    if first == '' or role ~= first then
      return tonumber(formed[i + 1])
    end
  end
  return tonumber(formed[2])
end

-- Where an engine's requests compute, from this formation and master on: what others have computed there, later ones may
-- begin with.
local function place_at(engine)
  local owner, term = lease(engine)
  return owner and owner ~= '' and term .. ' ' .. (call('HGET', ENGINE .. engine, 'epoch') or '') .. ' ' .. engine
end

-- The engine that a place names; nil for none.
local function engine_of(place)
  return (place or ''):match('^%d+ %d* (.*)$')
end

-- The same, while the place stands and its engine begins requests; or nil.
local function engine_at(place)
  local engine = engine_of(place)
  local stands = engine and place_at(engine) == place
  return stands and call('HGET', ENGINE .. engine, 'finishing') ~= '1' and engine or nil
end

-- The one engine that may take a request of the queue now, because the keys and values of its prefix are there; nil where
-- all may. It waits for it for PREFIX_WAIT, and until OVERTAKINGS have overtaken it. The arguments are the request's fields.
local function awaited(prefix_at, overtaken, queued_at)
  if (prefix_at or '') == '' or tonumber(overtaken) >= OVERTAKINGS or now() - queued_at >= PREFIX_WAIT then
    return nil
  end
  return engine_at(prefix_at)
end

-- Whether no engine has an adapter, or will have it: it is forgotten, or all engines that have formed, or all of one role,
-- say that they do not have it.
local KNOWN_LOST = {}
local function adapter_lost(adapter)
  if KNOWN_LOST[adapter] == nil then
    local hope = {} -- of those that decode, and of the others
    for _, engine in ipairs(call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE')) do
      local decodes = call('HGET', ENGINE .. engine, 'role') == 'decode'
      hope[decodes] = hope[decodes] or (call('HGET', HAS .. engine, adapter) or ''):sub(1, 1) ~= '-'
    end
    KNOWN_LOST[adapter] = call('HEXISTS', ADAPTERS, adapter) == 0 or hope[true] == false or hope[false] == false
  end
  return KNOWN_LOST[adapter]
end

-- Whether no engine can go on with a request that is tied to weights, or to an adapter. Where no engine has formed, it waits
-- for one.
local function stranded(tied, slots, there)
  local weights, adapter = parts_of(tied)
  if adapter ~= '' and adapter_lost(adapter) then
    return true
  end
  return weights ~= '' and there ~= nil and tonumber(slots) > (there[weights] or 0)
end

-- Why no engine can take a request, now and later: a number of REASON; nil where one can. The first two are the request's.
local function hopeless(tied, slots, there)
  if tonumber(slots) > (tonumber(call('HGET', POOL, 'slots')) or math.huge) then
    return REASON.NEVER_FITS
  end
  return stranded(tied, slots, there) and REASON.MODEL_CHANGED or nil
end

-- Tells one engine's master that a request waits which needs this number of slots, and has a tie: the emptiest of
-- those that asked and found nothing, or the one that is `awaited`. `handed`: the request is one that was handed over. Where
-- none of them has room, an engine learns it from the answer to its next commit, or renewal.
local function hint_waiting(slots, tied, only, handed)
  local asking = call('ZRANGE', ASKING, '+inf', slots, 'BYSCORE', 'REV')
  for _, engine in ipairs(asking) do
    if not only or engine == only then
      local mine, finishing, decodes = taste(engine)
      if suits(tied, engine, mine, finishing) and decodes == (handed or false) then
        call('ZREM', ASKING, engine)
        hint(engine, '')
        return true
      end
    end
  end
end

-- An engine on which a running request gives way to a new one of this class and order; nil where no engine has such a
-- request. `yielding` has the lowest class of the requests that hold an engine's places (where shares are fair, a number
-- above all classes). The last of them must come behind the new one.
local function yielding_to(slots, class, order)
  for _, engine in ipairs(call('ZRANGE', YIELDING, '+inf', '(' .. class, 'BYSCORE', 'REV', 'LIMIT', 0, LOOKED_AT)) do
    local rows, free, finishing = fields(ENGINE .. engine, 'rows', 'free', 'finishing')
    if rows and tonumber(rows) > 0 and tonumber(free) >= tonumber(slots) and finishing ~= '1' then
      local last = call('ZRANGE', CLAIMED .. engine, rows - 1, rows - 1, 'WITHSCORES')[2]
      if last and order < tonumber(last) then
        return engine
      end
    end
  end
end

-- The slots that the first request of the queue needs which fits into an engine; 0 when none is near the head.
local function head_needs(engine)
  local mine, finishing, decodes = taste(engine)
  for _, id in ipairs(call('ZRANGE', decodes and HANDED or WAITING, 0, LOOKED_AT - 1)) do
    local size, upfront, losses, weights, prefix_at, overtaken, queued_at = fields(REQUEST .. id, 'max_tokens', 'upfront',
      'losses', 'weights', 'prefix_at', 'overtaken', 'queued_at')
    local total = tonumber(call('ZSCORE', ENGINES, engine))
    local only = not decodes and awaited(prefix_at, overtaken, queued_at)
    if size and tonumber(size) <= total and suits(tied_to(id, weights), engine, mine, finishing)
      and (not only or only == engine) then -- else it is another engine's
      return tonumber(losses) >= SUSPECT_LOSSES and total or tonumber(upfront) -- a suspect runs alone
    end
  end
  return 0
end

-- What `head_needs` says, to an engine that would not hear of it otherwise: one that asks, and has room, gets a hint, or
-- another engine does.
local function unhinted_needs(engine)
  local slots = head_needs(engine)
  local room = slots > 0 and call('ZSCORE', ASKING, engine)
  return room and tonumber(room) >= slots and 0 or slots
end

-- Adds to counts of `load`: two arguments for each, its field and a number. A count that is 0 has no field.
local function add_load(...)
  local names, changed, gone = {}, {}, {}
  for i = 1, select('#', ...), 2 do
    names[#names + 1] = (select(i, ...))
  end
  local had = call('HMGET', LOAD, unpack(names))
  for i, name in ipairs(names) do
    local count = (had[i] or 0) + select(2 * i, ...)
    if count ~= 0 then
      changed[#changed + 1], changed[#changed + 2] = name, int(count)
    elseif had[i] then
      gone[#gone + 1] = name
    end
  end
  if #changed > 0 then
    call('HSET', LOAD, unpack(changed))
  end
  if #gone > 0 then
    call('HDEL', LOAD, unpack(gone))
  end
end

-- Counts a request in (sign 1) or out (-1) of the queue. `load` says how much waits: its new tokens, slots and
-- bytes; and of its tenant.
local function weigh(id, sign)
  local new, upfront, size, tenant = fields(REQUEST .. id, 'new', 'upfront', 'max_tokens', 'tenant')
  local bytes = call('HSTRLEN', REQUEST .. id, 'record')
  add_load('tokens', sign * math.max(new - committed(id), 0), 'slots', sign * upfront, 'bytes', sign * bytes,
    'tokens:' .. tenant, sign * size, 'waiting:' .. tenant, sign, 'bytes:' .. tenant, sign * bytes)
end

-- Puts a request into the queue, at its place.
local function enqueue(id, order)
  if call('ZADD', WAITING, order, id) == 1 then
    weigh(id, 1)
  end
end

-- Takes a request out of the queue, or from those that were handed over.
local function dequeue(id)
  if call('ZREM', WAITING, id) == 1 then
    weigh(id, -1)
  end
  call('ZREM', HANDED, id)
end

-- Tells the engine that has handed a request over that it may let go of its keys and values: another one has them, or none
-- wants them. Does nothing for other requests.
local function let_go(id)
  local place, claim = fields(REQUEST .. id, 'handed_at', 'handed_claim')
  if (place or '') ~= '' then
    call('HSET', REQUEST .. id, 'handed_at', '', 'handed_claim', '', 'handed', '')
    if call('EXISTS', ENGINE .. engine_of(place)) == 1 then -- a stream that is made for one that is gone would stay
      hint(engine_of(place), LET_GO .. claim)
    end
  end
end

-- Whether a request that was handed over can still be taken: the engine that did it stands where it stood, and the time is not
-- over for which it keeps keys and values. The arguments are the request's fields.
local function kept(handed_at, queued_at, time)
  local engine = engine_of(handed_at)
  return engine and place_at(engine) == handed_at and time - queued_at < KEEP
end

-- Sums up over the engines, for requests of `mean` slots: how many more would run now, how many tokens a microsecond are
-- made, by how many requests at a time, and when the first of them makes room.
--
-- An engine runs as many requests at a time as it has rows, and as its slots hold. Each of them gets a token in each
-- `pace`. Where engines have roles, requests begin on those that prefill, and those that decode make the tokens.
local function capacity(mean)
  local room, rate, width, first = 0, 0, 0, math.huge
  local engines = call('ZRANGE', ENGINES, 0, -1, 'WITHSCORES')
  for i = 1, #engines, 2 do
    local engine, slots = engines[i], engines[i + 1]
    local rows, free, pace, room_at, role = fields(ENGINE .. engine, 'rows', 'free', 'pace', 'room_at', 'role')
    if rows and tonumber(rows) > 0 then
      local running = call('ZCARD', CLAIMED .. engine)
      if running == 0 then
        free = slots -- its master tells so with the next renewal only
      end
      local open = math.min(rows - running, math.floor(free / mean))
      room = room + (role ~= 'decode' and math.max(open, 0) or 0)
      if tonumber(pace) > 0 and role ~= 'prefill' then
        local wide = math.max(running + open, 1)
        rate, width, first = rate + wide / pace, width + wide, math.min(first, room_at)
      end
    end
  end
  return room, rate, width, first
end

-- What `capacity` says, or said a moment ago where the engines are many.
local function recent_capacity(mean, time)
  local engines = call('ZCARD', ENGINES)
  if engines <= FEW then
    return capacity(mean)
  end
  local at, room, rate, width, first = fields(LOAD, 'at', 'room', 'rate', 'width', 'first')
  if at and time - at < engines * KEPT and time >= tonumber(at) then
    return tonumber(room), tonumber(rate), tonumber(width), tonumber(first)
  end
  room, rate, width, first = capacity(mean)
  local soonest = first < math.huge and int(first) or '0'
  call('HSET', LOAD, 'at', int(time), 'room', room, 'rate', rate, 'width', width, 'first', soonest)
  return room, rate, width, first
end

-- What the queue says of a request behind `ahead` others, which have `tokens` new tokens and `slots` slots together (the
-- request's own slots among them). Returns the microseconds until it begins, and what that was made of: the microseconds
-- until the first request makes room, those for each token that leaves the queue then, and how many requests run at a
-- time. All are nil while no engine has told its pace; the first is 0 while there is room for all of them.
local function prediction(ahead, tokens, slots, time)
  local room, rate, width, first = recent_capacity(slots / (ahead + 1), time)
  if rate == 0 then
    return nil
  end
  local length = tonumber(call('HGET', POOL, 'length')) or 1
  local soonest, each = math.max(first - time, 0), length / rate
  return room > ahead and 0 or soonest + tokens * each, soonest, each, width
end

-- The end of a request in its binary form (wire.FINISH).
local function finish_part(reason, output, submitted, claimed, first_token, finished, cached)
  return struct.pack(FINISH, reason, output, submitted, claimed, first_token, finished, cached)
end

-- The beginning of all packets for one call: whom they are for (wire.ADDRESS).
local function address(id, attempt)
  return struct.pack(ADDRESS, attempt, #id) .. id
end

-- A packet for one call (wire.CONTENT). `tokens` and their `tops` are in their binary form; `finish` is a finish_part, or
-- ''.
local function packet(id, attempt, first, tokens, finish, tops)
  local content = struct.pack(CONTENT, first, #tokens / TOKEN_SIZE, #finish, #tops)
  return address(id, attempt) .. content .. tokens .. finish .. tops
end

-- Writes an entry into an endpoint's delivery stream. Its id is its number: Redis counts 0-1, 0-2 and so on. A stream
-- that is gone is not made again: only its endpoint creates it, and nobody reads a dead endpoint's.
local function deliver(endpoint, engine, packets)
  call('XADD', DELIVERY .. endpoint, 'NOMKSTREAM', 'MAXLEN', DELIVERY_LENGTH, '0-*', 'e', engine, 'p', packets)
end

-- What a commit must know of a claimed request: the address of its packets, and the endpoint that they go to.
local function listener_of(id, attempt, endpoint)
  return address(id, attempt) .. endpoint
end

-- Gives the listeners of an engine a new number, because one of them changes. A commit compares it with the one at which
-- its packets were made. It is never given twice, also if Redis forgets a change.
local function move_listeners(engine)
  local last = call('HGET', ENGINE .. engine, 'listeners')
  if last then -- else the engine is gone
    call('HSET', ENGINE .. engine, 'listeners', int(number(last)))
  end
end

-- Makes a call the listener of a request, or nobody (endpoint ''). `before`: the endpoint that listened. `engine`: that
-- has claimed the request, '' for none.
local function set_listener(id, endpoint, attempt, before, claim, engine)
  if before ~= endpoint and before ~= '' then
    call('SREM', CALLS .. before, id)
  end
  if endpoint ~= '' then
    call('SADD', CALLS .. endpoint, id)
  end
  if engine ~= '' then
    call('HSET', LISTENERS .. engine, claim, listener_of(id, attempt, endpoint))
    move_listeners(engine)
  end
end

-- Takes a request from the engine that has claimed it.
local function unclaim(id, claim, engine)
  call('ZREM', CLAIMED .. engine, id)
  call('HDEL', LISTENERS .. engine, claim)
  move_listeners(engine)
end

-- The bytes that a request takes in Redis, roughly.
local function size_of(id)
  local strings = call('STRLEN', TOKENS .. id) + call('STRLEN', TOPS .. id) + call('STRLEN', PROMPT .. id)
  return RECORD_OVERHEAD + call('HSTRLEN', REQUEST .. id, 'record') + strings
end

-- The end of the last time without endpoints, or outage longer than LONG_OUTAGE: what had ended before can be read for RETENTION
-- from then on. A shorter outage takes little of that from a client, and there may be one each minute.
local function readable_at(time)
  local swept, readable = fields(POOL, 'swept', 'readable')
  return time - (tonumber(swept) or 0) > LONG_OUTAGE and time or tonumber(readable) or 0
end

-- Forgets ended requests, the oldest first, while they are too old or too many: `most` of them at once.
local function forget_oldest(time, most)
  local anew -- whether RETENTION has begun anew, once it matters: most ends find nothing old
  for _ = 1, most do
    local id, ended = unpack(call('ZRANGE', ENDED, 0, 0, 'WITHSCORES'))
    local old = id and time - ended > RETENTION
    if old and anew == nil then
      anew = time - readable_at(time) <= RETENTION
    end
    if not id or ((anew or not old) and call('ZCARD', ENDED) <= RETAIN_REQUESTS
      and (tonumber(call('HGET', POOL, 'ended_bytes')) or 0) <= RETAIN_BYTES) then
      return
    end
    call('HINCRBY', POOL, 'ended_bytes', -size_of(id))
    call('ZREM', ENDED, id)
    local mark = call('HGET', REQUEST .. id, 'mark')
    if mark and (call('HGET', PREFIXES, mark) or ''):sub(2) == id then
      call('HDEL', PREFIXES, mark)
    end
    call('DEL', REQUEST .. id, TOKENS .. id, TOPS .. id, PROMPT .. id)
  end
end

-- Ends the record of a request with `final` tokens, wherever the request is. Returns the finish_part of its packet.
local function end_record(id, reason, final)
  local key, time = REQUEST .. id, now()
  local engine, claim, endpoint, submitted, claimed_at, first_token, new, tenant, deadline, detach_at, cached, weights =
    fields(key, 'engine', 'claim', 'endpoint', 'submitted', 'claimed_at', 'first_token', 'new', 'tenant', 'deadline',
      'detach_at', 'cached', 'weights')
  if engine == '' then
    dequeue(id)
  else
    unclaim(id, claim, engine)
  end
  if deadline ~= '' or detach_at ~= '' then
    call('ZREM', DUE, id)
  end
  if endpoint ~= '' then
    call('SREM', CALLS .. endpoint, id)
  end
  let_go(id)
  add_load('requests:' .. tenant, -1)
  local _, adapter = parts_of(weights or '')
  if adapter ~= '' then
    call('SREM', USES .. adapter, id)
  end
  if tonumber(reason) <= REASON.STOP then -- the request said itself when it was done
    local length = tonumber(call('HGET', POOL, 'length')) or 1
    call('HSET', POOL, 'length', length + (final / new - length) / LENGTH_MEMORY)
  end
  call('HSET', key, 'state', 'ended', 'reason', reason, 'final', final, 'finished', int(time),
    'claim', '', 'engine', '')
  call('ZADD', ENDED, int(time), id)
  call('HINCRBY', POOL, 'ended_bytes', size_of(id))
  forget_oldest(time, 2) -- more than one: so what is too much shrinks
  return finish_part(reason, final, submitted, claimed_at, first_token, time, cached or 0)
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
    return
  end
  local head = call('ZRANGE', WAITING, 0, 0)[1] -- perhaps another one now
  if head then
    local slots, weights, prefix_at, overtaken, queued_at =
      fields(REQUEST .. head, 'upfront', 'weights', 'prefix_at', 'overtaken', 'queued_at')
    hint_waiting(slots or 0, tied_to(head, weights), awaited(prefix_at, overtaken, queued_at))
  end
end

-- Puts a request that was handed over back into the queue, at its place: it begins again, with all its tokens. Where no engine
-- can take it, it ends. `there`: as `weights_there` returns it.
local function begin_again(id, there)
  local state, order, slots, upfront, weights, prefix_at, overtaken =
    fields(REQUEST .. id, 'state', 'order', 'max_tokens', 'upfront', 'weights', 'prefix_at', 'overtaken')
  let_go(id)
  call('ZREM', HANDED, id)
  if state ~= 'handed' then -- Redis has evicted the record, and it may have come anew
    return
  end
  local tied = tied_to(id, weights)
  local reason = hopeless(tied, slots, there)
  if reason then
    end_early(id, reason, committed(id))
    return
  end
  enqueue(id, order)
  call('HSET', REQUEST .. id, 'state', 'waiting', 'queued_at', int(now()))
  hint_waiting(upfront, tied, awaited(prefix_at, overtaken, now()))
end

-- Tells the older call of a request that a newer one took over.
local function supersede(id, endpoint, attempt)
  if endpoint ~= '' then
    deliver(endpoint, '', packet(id, attempt, 0, '', finish_part(REASON.ABORTED, 0, 0, 0, 0, 0, 0), ''))
  end
end

-- Whether an endpoint's incarnation is registered.
local function registered(endpoint)
  return call('ZSCORE', ENDPOINTS, endpoint)
end

-- Deletes an endpoint's registration and stream. The next sweep finds its orphaned calls.
local function remove_endpoint(endpoint)
  if call('ZREM', ENDPOINTS, endpoint) == 1 then
    call('SADD', ORPHANS, endpoint)
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

-- Whether the pool has the tokens that a client saw: their number, and the SHA-1 (hex) of their ids ('' for none told).
-- Returns a number of REFUSAL when it has not.
local function unseen(id, seen, digest, count, reason)
  if seen > count then
    -- Where tokens were lost with Redis's last second, they may be made again.
    local over = reason ~= '0' and tonumber(reason) ~= REASON.STOP
    return over and REFUSAL.OTHER_TOKENS or REFUSAL.FEWER_TOKENS
  end
  if digest ~= '' and redis.sha1hex(ids_of(id, seen)) ~= digest then
    return REFUSAL.OTHER_TOKENS
  end
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

-- What a call is shown of a request. `known` and `last`: how many tokens it has, and the last of them. `count`: tokens that
-- the request has. `position` and `starts_in`: as below. `weights`: the request's field.
-- Returns {record, position, microseconds until a waiting request begins or '', index of the first token, tokens, their
-- tops, the prompt's logprobs, what made its tokens, engines, reason, final, submitted, claimed at,
-- first token, finished}. Record and prompt's logprobs are '' when the call has tokens: it has both.
local function shown(id, known, last, count, weights, position, starts_in)
  local key = REQUEST .. id
  local tokens, first = tokens_after(id, known, last, count)
  local record, prompt = '', ''
  if known == 0 then
    record, prompt = call('HGET', key, 'record'), call('GET', PROMPT .. id) or ''
  end
  return { record, position, starts_in and int(starts_in) or '', first, tokens, tops_between(id, first, count), prompt,
    made_by(id, weights), fields(key, 'engines', 'reason', 'final', 'submitted', 'claimed_at', 'first_token', 'finished',
      'cached') }
end

-- Makes a call the one listener of a request. The request is known, and the endpoint registered. `known` and `last`: how
-- many tokens the call has, and the last of them. `seen` and `digest`: as in `unseen`. A call that is refused changes
-- nothing for the one that listens.
-- Returns a number of REFUSAL, or what `shown` does.
local function attach(id, endpoint, attempt, known, last, seen, digest)
  local key = REQUEST .. id
  local attached, closed, listener, deadline, state, final, reason, claim, engine, weights =
    fields(key, 'attempt', 'closed', 'endpoint', 'deadline', 'state', 'final', 'reason', 'claim', 'engine', 'weights')
  local mine, theirs = tonumber(attempt), tonumber(attached)
  if mine < theirs or (mine == theirs and closed == '1') then
    return REFUSAL.STALE
  end
  local count = state == 'ended' and tonumber(final) or committed(id)
  local refusal = unseen(id, seen, digest, count, reason)
  if refusal then
    return refusal
  end
  if mine ~= theirs then
    supersede(id, listener, theirs)
  end
  call('HSET', key, 'endpoint', endpoint, 'attempt', attempt, 'closed', 0, 'detach_at', '')
  local position, starts_in = 0, nil
  if state ~= 'ended' then
    set_listener(id, endpoint, attempt, listener, claim, engine)
    set_due(id, deadline, '')
    position = (call('ZRANK', WAITING, id) or -1) + 1
  end
  if position > 0 then
    local waiting, tokens, slots = call('ZCARD', WAITING), fields(LOAD, 'tokens', 'slots')
    local ahead = (position - 1) / waiting -- a part of the whole queue
    starts_in = prediction(position - 1, ahead * (tokens or 0), position / waiting * (slots or 1), now())
  end
  return shown(id, known, last, count, weights, position, starts_in)
end

-- A claimed request as its master hears of it:
-- {id, claim, order, class, record, tokens, losses, microseconds to its deadline or '', submitted, queued at, taken at,
-- weights that are to make its tokens with its adapter behind a slash, the engine that had its prefix as it was submitted or '',
-- how many have overtaken it as it waited for that, where its keys and values are or ''}.
local function held_entry(id, claim, order, class, record, tokens, losses, deadline, submitted, queued_at, taken_at, weights,
  prefix_at, overtaken, handed, time)
  local left = deadline == '' and '' or int(deadline - time)
  return { id, claim, order, class, record, tokens, losses, left, submitted, queued_at, taken_at, weights,
    engine_of(prefix_at) or '', overtaken or '0', handed or '' }
end

-- Appends the held_entry of a claimed request to a reply.
local function add_held(reply, id, time)
  local claim, order, class, record, losses, deadline, submitted, queued_at, taken_at, weights, prefix_at, overtaken, handed =
    fields(REQUEST .. id, 'claim', 'order', 'class', 'record', 'losses', 'deadline', 'submitted', 'queued_at', 'taken_at',
      'weights', 'prefix_at', 'overtaken', 'handed')
  local tokens = call('GET', TOKENS .. id) or ''
  reply[#reply + 1] = held_entry(id, claim, order, class, record, tokens, losses, deadline, submitted, queued_at, taken_at,
    weights or '', prefix_at, overtaken, handed, time)
end

-- The answers of a script that several operations share, each with so many arguments. One that fails has its error alone.
local function one_by_one(count, operate)
  local answers = {}
  for i = 1, #ARGV, count do
    local _, answer = pcall(operate, unpack(ARGV, i, i + count - 1))
    answers[#answers + 1] = type(answer) == 'string' and redis.error_reply(answer) or answer
  end
  return answers
end
