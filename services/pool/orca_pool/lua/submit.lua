-- Puts a request into the queue and attaches its call. A known request with the same body is only attached.
--
-- KEYS: the pool hash.
-- ARGV: request id, record, digest of the body, max_tokens (input and new tokens, so the slots that it needs),
--   microseconds until its deadline or '', detach grace (microseconds), endpoint, attempt, the longest allowed queue.
--   The record is '' where Redis has no memory left: then a known request is attached, and a new one refused.
-- Returns what `attach` of prelude.lua returns, or a number of REFUSAL.
local id, record, body_digest, max_tokens, deadline_in, grace, endpoint, attempt, max_waiting = unpack(ARGV)
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
if call('ZCARD', WAITING) >= tonumber(max_waiting) then
  return REFUSAL.FULL
end
local arrival, time = call('HINCRBY', POOL, 'arrival', 1), now()
local deadline = deadline_in == '' and '' or int(time + deadline_in)
call('HSET', key, 'record', record, 'digest', body_digest, 'max_tokens', max_tokens, 'grace', grace,
  'state', 'waiting', 'arrival', arrival, 'claim', '', 'engine', '', 'endpoint', endpoint, 'attempt', attempt,
  'closed', 0, 'losses', 0, 'loss_at', -1, 'reason', 0, 'final', 0, 'deadline', deadline, 'detach_at', '',
  'engines', '', 'submitted', int(time), 'claimed_at', 0, 'first_token', 0, 'finished', 0)
call('ZADD', WAITING, arrival, id)
hint_waiting(max_tokens)
return attach(id, endpoint, attempt, 0, '', 0, '')
