-- Renews an engine's lease. The master tells what is new about its engine, and learns what the engine has claimed.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, then each of these or '': epoch, last reserved iteration number, slots, tensor parallel,
--   pipeline parallel (these three come together, after a formation), the version of the claims that the master knows.
-- Returns {epoch, last reserved iteration number, last claim number, version, {request id, claim number}...}, with the
--   claims only where their version is another one; nil when the master has lost the lease.
local engine, owner, term, epoch, reserve, slots, tp, pp, known, rows, free, pace, room_in = unpack(ARGV)
if fenced(engine, owner, term) then
  return false
end
local key = ENGINE .. engine
local epoch_now, reserved = fields(key, 'epoch', 'reserved')
call('HINCRBY', key, 'counter', 1)
call('HSET', key, 'rows', rows, 'free', free, 'pace', pace, 'room_at', int(now() + room_in))
-- A renewal may come late, after a newer one: neither number ever gets smaller.
if epoch ~= '' then
  call('HSET', key, 'epoch', int(math.max(tonumber(epoch), tonumber(epoch_now))))
end
if reserve ~= '' then
  call('HSET', key, 'reserved', int(math.max(tonumber(reserve), tonumber(reserved))))
end
if slots ~= '' then
  call('HSET', key, 'slots', slots, 'tp', tp, 'pp', pp)
  call('HSET', POOL, 'slots', math.max(tonumber(slots), tonumber(call('HGET', POOL, 'slots')) or 0))
end
-- Each new claim has a new number, and without one the set only shrinks. So both numbers together name the set.
local epoch_then, reserved_then, last_claim = fields(key, 'epoch', 'reserved', 'last_claim')
local version = last_claim .. ':' .. call('ZCARD', CLAIMED .. engine)
local reply = { epoch_then, reserved_then, last_claim, version }
if version ~= known then
  for _, id in ipairs(call('ZRANGE', CLAIMED .. engine, 0, -1)) do
    reply[#reply + 1] = { id, call('HGET', REQUEST .. id, 'claim') }
  end
end
return reply
