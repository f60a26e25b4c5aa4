-- Puts a request into the queue and attaches its call; a known id with the same body is only attached.
-- ARGV: id, record, body digest, need (slots), microseconds until its deadline or '', detach grace (microseconds),
--       endpoint, attempt, longest queue.
-- Returns what `attach` answers, or a refusal.
local id, need, endpoint = ARGV[1], tonumber(ARGV[4]), ARGV[7]
local key = REQUEST .. id
if not registered(endpoint) then
  return UNREGISTERED
end
local digest = call('HGET', key, 'digest')
if digest then
  return digest == ARGV[3] and attach(id, endpoint, ARGV[8]) or OTHER_BODY
end
local largest = tonumber(call('HGET', POOL, 'slots')) or 0
if largest == 0 then
  return NO_ENGINE
end
if need > largest then
  return NEVER_FITS
end
if call('ZCARD', WAITING) >= tonumber(ARGV[9]) then
  return FULL
end
local arrival, time = call('HINCRBY', POOL, 'arrival', 1), now()
local deadline = ARGV[5] == '' and '' or int(time + ARGV[5])
call('HSET', key, 'record', ARGV[2], 'digest', ARGV[3], 'need', ARGV[4], 'grace', ARGV[6], 'state', 'waiting',
  'arrival', arrival, 'claim', '', 'engine', '', 'endpoint', endpoint, 'attempt', ARGV[8], 'closed', 0,
  'losses', 0, 'loss_at', -1, 'reason', 0, 'final', 0, 'deadline', deadline, 'detach_at', '', 'engines', '',
  'submitted', int(time), 'claimed_at', 0, 'first_token', 0, 'finished', 0)
call('ZADD', WAITING, arrival, id)
hint_waiting()
return attach(id, endpoint, ARGV[8])
