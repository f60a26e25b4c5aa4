-- Puts a request into the queue and attaches its call. A known request with the same body is only attached.
--
-- KEYS: the pool hash.
-- ARGV: request id, record, digest of the body, max_tokens (input and new tokens, so the slots that it needs),
--   microseconds until its deadline or '', detach grace (microseconds), endpoint, attempt, new tokens, tenant, then the
--   limits, '' for none: requests in the queue, their bytes, the tenant's requests (waiting or claimed), its slots in the
--   queue. The record is '' where Redis has no memory left: then a known request is attached, and a new one refused.
-- Returns what `attach` of prelude.lua returns (without the record, where the request is new: its endpoint has it), a number
--   of REFUSAL, or {a number of REFUSAL, microseconds until the request would begin if it were in the queue, or ''}.
local id, record, body_digest, max_tokens, deadline_in, grace, endpoint, attempt, new, tenant = unpack(ARGV)
local max_waiting, max_bytes, max_requests, max_queued = unpack(ARGV, 11)
local MARGIN = 1.15 -- a prediction is an estimate, and what it promises must hold

-- Whether a count with `more` would be above its limit.
local function above(count, more, limit)
  return (count or 0) + more > (tonumber(limit) or math.huge)
end
local key = REQUEST .. id
if not registered(endpoint) then
  return REFUSAL.UNREGISTERED
end
local known_digest = call('HGET', key, 'digest')
if known_digest then
  return known_digest == body_digest and attach(id, endpoint, attempt, 0, '', 0, '') or REFUSAL.OTHER_BODY
end
if record == '' then
  return REFUSAL.MEMORY
end
local largest = tonumber(call('HGET', POOL, 'slots')) or 0
if largest == 0 then
  return REFUSAL.NO_ENGINE
end
if tonumber(max_tokens) > largest then
  return REFUSAL.NEVER_FITS
end
local time, ahead = now(), call('ZCARD', WAITING)
local tokens, slots, bytes, requests, queued =
  fields(LOAD, 'tokens', 'slots', 'bytes', 'requests:' .. tenant, 'tokens:' .. tenant)
local wait, pace = prediction(ahead, tonumber(tokens) or 0, (tonumber(slots) or 0) + max_tokens, time)
local told = wait and int(wait) or ''
if above(requests, 1, max_requests) or above(queued, max_tokens, max_queued) then
  return { REFUSAL.TENANT_FULL, told }
end
if ahead >= (tonumber(max_waiting) or math.huge) or above(bytes, #record, max_bytes) then
  return { REFUSAL.FULL, told }
end
-- What must wait is accepted only if it can still end in time. What need not wait keeps nobody from anything.
if deadline_in ~= '' and wait and wait > 0 then
  local length = tonumber(call('HGET', POOL, 'length')) or 1
  if (wait + new * length * pace) * MARGIN > tonumber(deadline_in) then
    return { REFUSAL.LATE, told }
  end
end
local arrival = call('HINCRBY', POOL, 'arrival', 1)
local deadline = deadline_in == '' and '' or int(time + deadline_in)
call('HSET', key, 'record', record, 'digest', body_digest, 'max_tokens', max_tokens, 'grace', grace,
  'state', 'waiting', 'arrival', arrival, 'claim', '', 'engine', '', 'endpoint', endpoint, 'attempt', attempt,
  'closed', 0, 'losses', 0, 'loss_at', -1, 'reason', 0, 'final', 0, 'deadline', deadline, 'detach_at', '',
  'engines', '', 'new', new, 'tenant', tenant, 'submitted', int(time), 'claimed_at', 0, 'first_token', 0, 'finished', 0)
call('ZADD', WAITING, arrival, id)
add_load('tokens', new, 'slots', max_tokens, 'bytes', #record, 'tokens:' .. tenant, max_tokens, 'requests:' .. tenant, 1)
call('SADD', CALLS .. endpoint, id)
if deadline ~= '' then
  set_due(id, deadline, '')
end
hint_waiting(max_tokens)
return { '', ahead + 1, told, 0, '', '', '', '', '0', '0', int(time), '0', '0', '0' }
