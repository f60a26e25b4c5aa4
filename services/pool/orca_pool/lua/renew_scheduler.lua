-- Renews a scheduler and sweeps: dead processes, deadlines, detach grace, calls of dead endpoints, what fits nowhere.
-- ARGV: scheduler, detach floor (microseconds): the grace of calls that their endpoint ended.
-- Returns {living schedulers, {engine, owner or '', term, counter}...}.
local SWEEP_AT_ONCE = 256 -- requests ended by one sweep: a bound on the time that Redis is held

-- Calls whose endpoint is gone have the grace to be attached again.
local function detach_orphans(ids, time, floor)
  for _, id in ipairs(ids) do
    local key = REQUEST .. id
    local r = call('HMGET', key, 'endpoint', 'detach_at', 'grace', 'deadline')
    if r[1] ~= '' and r[2] == '' and not registered(r[1]) then
      local detach_at = int(time + math.max(tonumber(r[3]), floor))
      call('HSET', key, 'detach_at', detach_at)
      set_due(id, r[4], detach_at)
    end
  end
end

-- The slots of the largest engine; nil while one of them has never formed, so that nobody knows.
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
  for _, endpoint in ipairs(call('ZRANGEBYSCORE', ENDPOINTS, '-inf', '(' .. int(time - LEASE))) do
    remove_endpoint(endpoint)
  end
  call('ZREMRANGEBYSCORE', SCHEDULERS, '-inf', '(' .. int(time - LEASE))
  if call('HDEL', POOL, 'orphans') == 1 then
    detach_orphans(call('ZRANGE', WAITING, 0, -1), time, floor)
    for _, engine in ipairs(call('SMEMBERS', ENGINES)) do
      detach_orphans(call('ZRANGE', CLAIMED .. engine, 0, -1), time, floor)
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', int(time), 'LIMIT', 0, SWEEP_AT_ONCE)) do
    local r = call('HMGET', REQUEST .. id, 'deadline', 'detach_at')
    end_early(id, overdue(r[1], r[2], time), committed(id))
  end
  -- Submit refuses what is larger than the largest engine ever: only when that one is gone can something fit nowhere.
  local largest = largest_engine()
  if largest and largest < tonumber(call('HGET', POOL, 'slots')) then
    for _, id in ipairs(call('ZRANGE', WAITING, 0, -1)) do
      if tonumber(call('HGET', REQUEST .. id, 'need')) > largest then
        end_early(id, LARGER, committed(id))
      end
    end
  end
end

local scheduler, floor, time = ARGV[1], tonumber(ARGV[2]), now()
local gap = time - (tonumber(call('HGET', POOL, 'swept')) or 0)
call('HSET', POOL, 'swept', int(time))
if gap > SWEEP_GAP then
  -- After an outage nobody is dead for not having renewed: every lease starts again.
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
  local g = call('HMGET', ENGINE .. engine, 'owner', 'term', 'counter')
  reply[#reply + 1] = { engine, g[1], g[2], g[3] }
end
return reply
