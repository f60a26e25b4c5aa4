-- Renews a scheduler's registration, and sweeps: removes dead endpoints and schedulers, ends requests whose deadline or
-- detach grace is over, and ends those that fit no engine any more.
--
-- KEYS: the pool hash.
-- ARGV: scheduler, detach floor (microseconds): the least grace of a call whose endpoint died.
-- Returns {number of living schedulers, {engine, owner or '', term, counter}...}.
local SWEEP_AT_ONCE = 256 -- requests that one sweep ends at most, which bounds the time for which Redis is busy

-- Gives the orphaned calls among these requests their grace to be attached again. Their endpoint is gone.
local function detach_orphaned_calls(ids, time, floor)
  for _, id in ipairs(ids) do
    local key = REQUEST .. id
    local endpoint, detach_at, grace, deadline = fields(key, 'endpoint', 'detach_at', 'grace', 'deadline')
    if endpoint ~= '' and detach_at == '' and not registered(endpoint) then
      detach_at = int(time + math.max(tonumber(grace), floor))
      call('HSET', key, 'detach_at', detach_at)
      set_due(id, deadline, detach_at)
    end
  end
end

-- The slots of the largest engine. nil while an engine has never formed: it may turn out to be the largest.
local function largest_engine()
  local largest
  for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
    local slots = tonumber(call('HGET', ENGINE .. engine, 'slots'))
    if slots == 0 then
      return nil
    end
    largest = math.max(largest or 0, slots)
  end
  return largest
end

-- Ends what is over. `due`: requests whose moment has come by then end.
local function sweep(time, floor, due)
  local expired = '(' .. int(time - LEASE)
  for _, endpoint in ipairs(call('ZRANGEBYSCORE', ENDPOINTS, '-inf', expired)) do
    remove_endpoint(endpoint)
  end
  call('ZREMRANGEBYSCORE', SCHEDULERS, '-inf', expired)
  if call('HDEL', POOL, 'orphaned_calls') == 1 then
    detach_orphaned_calls(call('ZRANGE', WAITING, 0, -1), time, floor)
    for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
      detach_orphaned_calls(call('ZRANGE', CLAIMED .. engine, 0, -1), time, floor)
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', int(due), 'LIMIT', 0, SWEEP_AT_ONCE)) do
    local deadline, detach_at = fields(REQUEST .. id, 'deadline', 'detach_at')
    end_early(id, overdue(deadline, detach_at, time), committed(id))
  end
  -- `submit` refuses a request that is larger than the largest engine that ever formed. So a waiting request can be too
  -- large for all engines only when that engine is gone.
  local largest = largest_engine()
  if largest and largest < tonumber(call('HGET', POOL, 'slots')) then
    for _, id in ipairs(call('ZRANGE', WAITING, 0, -1)) do
      if tonumber(call('HGET', REQUEST .. id, 'max_tokens')) > largest then
        end_early(id, REASON.NEVER_FITS, committed(id))
      end
    end
  end
end

local scheduler, floor, time = ARGV[1], tonumber(ARGV[2]), now()
local swept = tonumber(call('HGET', POOL, 'swept')) or 0
local gap, due = time - swept, time
call('HSET', POOL, 'swept', int(time))
if gap > SWEEP_GAP then
  -- The pool was away, so nobody could renew, or the schedulers were late. Nobody knows which. A gap longer than a lease is
  -- an outage: every lease starts again. A shorter one counts as one renewal's time, so that late looks, one after the
  -- other, still find the dead. Of the requests only those end that were due at the look before: the others' clients may
  -- have been cut off.
  due = swept
  local back = gap > LEASE and gap + LEASE or gap - RENEWAL
  for _, processes in ipairs({ ENDPOINTS, SCHEDULERS }) do
    local page = call('ZRANGE', processes, 0, -1, 'WITHSCORES')
    for i = 1, #page, 2 do
      call('ZADD', processes, int(math.min(page[i + 1] + back, time)), page[i])
    end
  end
end
sweep(time, floor, due)
call('ZADD', SCHEDULERS, int(time), scheduler)
local reply = { call('ZCARD', SCHEDULERS) }
for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
  reply[#reply + 1] = { engine, fields(ENGINE .. engine, 'owner', 'term', 'counter') }
end
return reply
