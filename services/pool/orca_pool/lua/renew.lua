-- Renews an engine's lease. The master tells what is new about its engine, and learns what the engine has claimed.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, then each of these or '': epoch, last reserved iteration number, slots, tensor parallel,
--   pipeline parallel, name of the policy, slots of a block, 1 where a request reserves slots for its output, too, whose
--   keys and values a request may begin with, the engine's role: '', prefill or decode (these eight come together, after a formation), weights of the last
--   formation, the version of the claims that the master knows; then the engine's load: requests that it can run at a
--   time, free slots, its pace and in how long a request that runs makes room (both in microseconds), 1 while it finishes,
--   and the lowest class of requests that may give way to new ones (0: there is no such request).
-- Returns {epoch, last reserved iteration number, last claim number, version, slots that the head of the queue needs or 0,
--   the version of the adapters' table, {request id, claim number}...}, with the claims only where their version is another one; nil when the master has lost
--   the lease.
local engine, owner, term, epoch, reserve, slots, tp, pp, policy, block, output, prefix, role, weights, known, rows, free, pace, room_in, finishing, yields =
  unpack(ARGV)
local owner_now, term_now, counter = lease(engine)
if owner_now ~= owner or term_now ~= term then
  return false
end
set_lease(engine, owner, term, counter + 1)
local key = ENGINE .. engine
local epoch_now, reserved, weights_now = fields(key, 'epoch', 'reserved', 'weights')
call('HSET', key, 'rows', rows, 'free', free, 'pace', pace, 'room_at', int(now() + room_in),
  'finishing', finishing)
if yields == '0' then
  call('ZREM', YIELDING, engine)
else
  call('ZADD', YIELDING, yields, engine)
end
-- A renewal may come late, after a newer one: neither number ever gets smaller.
if epoch ~= '' then
  call('HSET', key, 'epoch', int(math.max(tonumber(epoch), tonumber(epoch_now))))
end
if reserve ~= '' then
  call('HSET', key, 'reserved', int(math.max(tonumber(reserve), tonumber(reserved))))
end
if slots ~= '' then
  call('DEL', HAS .. engine) -- its ranks may be new: the master says anew which adapters they have
  call('HSET', key, 'tp', tp, 'pp', pp, 'policy', policy, 'role', role)
  call('ZADD', ENGINES, slots, engine)
  call('HSET', POOL, 'slots', math.max(largest_there(), tonumber(call('HGET', POOL, 'slots')) or 0), 'block', block,
    'output', output, 'prefix', prefix)
end
-- Told with each renewal, because Redis may have forgotten the formation.
local changed = weights ~= '' and weights ~= weights_now
if changed then
  call('HSET', key, 'weights', weights)
end
if changed or slots ~= '' then
  call('HSET', POOL, 'shrunk', 0) -- what waits may fit no engine now: the sweep looks at the queue
end
-- Each new claim has a new number, and without one the set only shrinks. So both numbers together name the set.
local epoch_then, reserved_then, last_claim = fields(key, 'epoch', 'reserved', 'last_claim')
local version = last_claim .. ':' .. call('ZCARD', CLAIMED .. engine)
local reply = { epoch_then, reserved_then, last_claim, version, head_needs(engine), call('HGET', POOL, 'adapters') or '0' }
if version ~= known then
  for _, id in ipairs(call('ZRANGE', CLAIMED .. engine, 0, -1)) do
    local claim = call('HGET', REQUEST .. id, 'claim')
    if claim then -- else Redis has evicted the record
      reply[#reply + 1] = { id, claim }
    end
  end
end
return reply
