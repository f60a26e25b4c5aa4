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

local function sweep(time, floor)
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
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', int(time), 'LIMIT', 0, SWEEP_AT_ONCE)) do
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
local gap = time - (tonumber(call('HGET', POOL, 'swept')) or 0)
call('HSET', POOL, 'swept', int(time))
if gap > SWEEP_GAP then
  -- The pool was away, or no scheduler lived: nobody could renew, or nobody looked. Every lease starts again.
  for _, processes in ipairs({ ENDPOINTS, SCHEDULERS }) do
    for _, process in ipairs(call('ZRANGE', processes, 0, -1)) do
      call('ZADD', processes, int(time), process)
    end
  end
else
  sweep(time, floor)
end
call('ZADD', SCHEDULERS, int(time), scheduler)
local reply = { call('ZCARD', SCHEDULERS) }
for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
  reply[#reply + 1] = { engine, fields(ENGINE .. engine, 'owner', 'term', 'counter') }
end
return reply
