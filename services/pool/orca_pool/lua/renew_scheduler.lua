-- Renews a scheduler's registration, and sweeps: removes dead endpoints and schedulers, ends requests whose deadline or
-- detach grace is over, ends those that no engine can go on with any more, and queues those again that were handed over in vain.
--
-- KEYS: the pool hash.
-- ARGV: scheduler, detach floor (microseconds): the least grace of a call whose endpoint died.
-- Returns {engine, 'counter term owner' (no owner: free), ..., number of living schedulers, requests in the queue,
-- microseconds since the first of them was submitted or 0}.
--
-- Its cost follows what is due. Only the answer has a part for each engine.

-- Each bounds the time for which one sweep keeps Redis busy: requests that it ends, forgets or looks at, and keys of
-- which it looks whether each is where it belongs.
local SWEEP_AT_ONCE, CHECK_AT_ONCE = 256, 32

-- Gives calls whose endpoint is gone their grace to be attached again.
local function detach_orphan(id, endpoint, time, floor)
  local key = REQUEST .. id
  local listener, detach_at, grace, deadline = fields(key, 'endpoint', 'detach_at', 'grace', 'deadline')
  if listener == endpoint and detach_at == '' then
    local lives = math.max(tonumber(grace), floor)
    detach_at = int(time + lives)
    call('HSET', key, 'detach_at', detach_at, 'lives', int(lives))
    set_due(id, deadline, detach_at)
  end
end

local function detach_orphans(time, floor)
  for _, endpoint in ipairs(call('SMEMBERS', ORPHANS)) do
    if not registered(endpoint) then
      for _, id in ipairs(call('SPOP', CALLS .. endpoint, SWEEP_AT_ONCE)) do
        detach_orphan(id, endpoint, time, floor)
      end
    end
    if registered(endpoint) or call('EXISTS', CALLS .. endpoint) == 0 then
      call('SREM', ORPHANS, endpoint)
    end
  end
end

-- Follows the engines. When the largest one shrinks, or one gets other weights that are expected back no longer, requests may
-- wait that no engine can go on with: they end, a page of the queue at each sweep. Without any engine they wait for one.
local function end_what_no_engine_can(due)
  if call('ZREMRANGEBYSCORE', EXPECTED, '-inf', int(due)) > 0 then
    call('HSET', POOL, 'shrunk', 0)
  end
  local largest = largest_there()
  -- An engine that has never formed may turn out to be the largest.
  if largest and call('ZCOUNT', ENGINES, 0, 0) == 0 and largest < (tonumber(call('HGET', POOL, 'slots')) or 0) then
    call('HSET', POOL, 'slots', largest, 'shrunk', 0)
  end
  local after = call('HGET', POOL, 'shrunk')
  if not after then
    return
  end
  local there = weights_there()
  local page = call('ZRANGE', WAITING, '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, SWEEP_AT_ONCE, 'WITHSCORES')
  for i = 1, #page, 2 do
    local id = page[i]
    local slots, weights = fields(REQUEST .. id, 'max_tokens', 'weights')
    local reason = slots and hopeless(tied_to(id, weights), slots, there) -- else Redis has evicted the record
    if reason then
      end_early(id, reason, committed(id))
    end
  end
  if #page == 2 * SWEEP_AT_ONCE then
    call('HSET', POOL, 'shrunk', page[#page])
  else
    call('HDEL', POOL, 'shrunk')
  end
end

-- Puts a request where it belongs, if it is not there: Redis may have evicted the queue, or another index.
local function restore(id, time, floor)
  local key = REQUEST .. id
  local state, order, claim, engine, endpoint, attempt, deadline, detach_at, upfront, weights, prefix_at, overtaken, queued_at =
    fields(key, 'state', 'order', 'claim', 'engine', 'endpoint', 'attempt', 'deadline', 'detach_at', 'upfront', 'weights',
      'prefix_at', 'overtaken', 'queued_at')
  if not order then -- evicted, and written to again
    call('DEL', key)
    return
  end
  if state == 'ended' then
    if not call('ZSCORE', ENDED, id) then
      call('ZADD', ENDED, int(time), id)
      call('HINCRBY', POOL, 'ended_bytes', size_of(id))
    end
    return
  end
  local held = state == 'claimed' and call('ZSCORE', CLAIMED .. engine, id)
  if state == 'claimed' and not (held and call('HEXISTS', LISTENERS .. engine, claim) == 1) then
    unclaim(id, claim, engine)
    let_go(id)
    call('HSET', key, 'state', 'waiting', 'claim', '', 'engine', '')
    state = 'waiting'
  end
  if state == 'handed' then
    call('ZADD', HANDED, order, id)
  end
  if state == 'waiting' and not call('ZSCORE', WAITING, id) then
    enqueue(id, order)
    hint_waiting(upfront, tied_to(id, weights), awaited(prefix_at, overtaken, queued_at))
  end
  if (deadline ~= '' or detach_at ~= '') and not call('ZSCORE', DUE, id) then
    set_due(id, deadline, detach_at)
  end
  if endpoint ~= '' and registered(endpoint) then
    call('SADD', CALLS .. endpoint, id)
  elseif endpoint ~= '' and call('SISMEMBER', ORPHANS, endpoint) == 0 then
    detach_orphan(id, endpoint, time, floor)
  end
end

-- Queues those again that were handed over and cannot be taken any more: the engine that did it was lost, or no other one has
-- come for them in time. Those that no engine can take end.
local function queue_what_was_handed_in_vain(time)
  local there -- looked up where a request needs it
  for _, id in ipairs(call('ZRANGE', HANDED, 0, SWEEP_AT_ONCE - 1)) do
    local handed_at, queued_at = fields(REQUEST .. id, 'handed_at', 'queued_at')
    if not kept(handed_at, queued_at or 0, time) then
      there = there or weights_there()
      begin_again(id, there)
    end
  end
end

-- Looks at some keys of the pool, others at each sweep: a request must be in its queue, and tokens must have a request.
local function check_some(time, floor)
  local pattern = PREFIX:gsub('[%[%]%*%?%^\\]', '\\%0') .. '[prt]*:*'
  local cursor, keys = unpack(call('SCAN', call('HGET', POOL, 'checked') or 0, 'MATCH', pattern, 'COUNT', CHECK_AT_ONCE))
  for _, key in ipairs(keys) do
    if key:sub(1, #REQUEST) == REQUEST then
      restore(key:sub(#REQUEST + 1), time, floor)
    end
    for _, prefix in ipairs({ TOKENS, TOPS, PROMPT }) do
      if key:sub(1, #prefix) == prefix and call('EXISTS', REQUEST .. key:sub(#prefix + 1)) == 0 then
        call('DEL', key)
      end
    end
  end
  call('HSET', POOL, 'checked', cursor)
end

-- The same of what is known of prompts.
local function check_prefixes()
  if call('EXISTS', PREFIXES) == 0 then
    return
  end
  local cursor, marks = unpack(call('HSCAN', PREFIXES, call('HGET', POOL, 'checked_prefixes') or 0, 'COUNT', CHECK_AT_ONCE))
  for i = 1, #marks, 2 do
    if call('EXISTS', REQUEST .. marks[i + 1]:sub(2)) == 0 then
      call('HDEL', PREFIXES, marks[i])
    end
  end
  call('HSET', POOL, 'checked_prefixes', cursor)
end

-- Whether a request has an adapter. Those are taken out of its set whose records Redis has evicted.
local function in_use(adapter)
  for _, id in ipairs(call('SRANDMEMBER', USES .. adapter, SWEEP_AT_ONCE)) do
    local _, has = parts_of(call('HGET', REQUEST .. id, 'weights') or '')
    if has ~= adapter then
      call('SREM', USES .. adapter, id)
    end
  end
  return call('EXISTS', USES .. adapter) == 1
end

-- Forgets adapters that were unloaded or replaced, when no request has them any more, and no endpoint can name them.
local function forget_adapters(time)
  local look = tonumber(call('HGET', POOL, 'retired'))
  if not look or time < look then
    return
  end
  local page, left = call('HGETALL', ADAPTERS), false
  for i = 1, #page, 2 do
    local id, entry = page[i], cjson.decode(page[i + 1])
    if entry.state == 'retired' then
      if time >= math.max(entry.at, back_at(time)) + ADAPTER_GRACE and not in_use(id) then
        call('HDEL', ADAPTERS, id)
        call('HINCRBY', POOL, 'adapters', 1)
      else
        left = true
      end
    end
  end
  if left then
    call('HSET', POOL, 'retired', int(time + LEASE))
  else
    call('HDEL', POOL, 'retired')
  end
end

-- Ends what is over. `due`: requests whose moment has come by then end. `outage`: the pool was away until now, `long`: for more
-- than LONG_OUTAGE. To clients it is away, too, while there is no endpoint.
local function sweep(time, floor, due, outage, long)
  local expired = '(' .. int(time - LEASE)
  for _, endpoint in ipairs(call('ZRANGEBYSCORE', ENDPOINTS, '-inf', expired)) do
    remove_endpoint(endpoint)
  end
  local none = call('EXISTS', ENDPOINTS) == 0
  if outage or none then
    call('HSET', POOL, 'back', int(time))
  end
  if long or none then
    call('HSET', POOL, 'readable', int(time))
  end
  call('ZREMRANGEBYSCORE', SCHEDULERS, '-inf', expired)
  detach_orphans(time, floor)
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', int(due), 'LIMIT', 0, SWEEP_AT_ONCE)) do
    local deadline, detach_at, lives = fields(REQUEST .. id, 'deadline', 'detach_at', 'lives')
    local reason = overdue(deadline, detach_at, lives, time)
    if reason then
      end_early(id, reason, committed(id))
    elseif deadline then
      if detach_at ~= '' then
        detach_at = int(grace_end(detach_at, lives, time))
        call('HSET', REQUEST .. id, 'detach_at', detach_at)
      end
      set_due(id, deadline, detach_at)
    else
      call('ZREM', DUE, id) -- Redis has evicted the record
    end
  end
  queue_what_was_handed_in_vain(time)
  end_what_no_engine_can(due)
  forget_adapters(time)
  forget_oldest(time, SWEEP_AT_ONCE)
  check_some(time, floor)
  check_prefixes()
end

local scheduler, floor, time = ARGV[1], tonumber(ARGV[2]), now()
local swept = tonumber(call('HGET', POOL, 'swept')) or 0
local gap, due = time - swept, time
local outage = gap > LEASE
call('HSET', POOL, 'swept', int(time))
if gap > SWEEP_GAP then
  -- The pool was away, so nobody could renew, or the schedulers were late. Nobody knows which. A gap longer than a lease is
  -- an outage: every lease starts again. A shorter one counts as one renewal's time, so that late looks, one after the
  -- other, still find the dead. Of the requests only those end that were due at the look before: the others' clients may
  -- have been cut off.
  due = swept
  local back = outage and gap + LEASE or gap - RENEWAL
  for _, processes in ipairs({ ENDPOINTS, SCHEDULERS }) do
    local page = call('ZRANGE', processes, 0, -1, 'WITHSCORES')
    for i = 1, #page, 2 do
      call('ZADD', processes, int(math.min(page[i + 1] + back, time)), page[i])
    end
  end
  for _, weights in ipairs(outage and swept > 0 and call('ZRANGE', EXPECTED, 0, -1) or {}) do
    call('ZINCRBY', EXPECTED, int(gap), weights) -- no engine could form meanwhile
  end
end
sweep(time, floor, due, outage, gap > LONG_OUTAGE)
call('ZADD', SCHEDULERS, int(time), scheduler)
local reply = call('HGETALL', LEASES)
local first = call('ZRANGE', WAITING, 0, 0)[1]
local submitted = first and tonumber((fields(REQUEST .. first, 'submitted'))) or time -- Redis may have evicted the record
reply[#reply + 1] = call('ZCARD', SCHEDULERS)
reply[#reply + 1] = call('ZCARD', WAITING)
reply[#reply + 1] = int(math.max(time - submitted, 0))
return reply
