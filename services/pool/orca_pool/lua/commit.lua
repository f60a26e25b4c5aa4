-- Commits what iterations made: appends its tokens, records the ends of requests, and writes one delivery entry for each
-- endpoint concerned.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, then five for each row: request id, claim number, base (the index of its first token),
--   reason of the request's end or '', tokens in their binary form.
-- Returns {slots that the head of the queue needs or 0, then for each row COMMITTED.OK, COMMITTED.GONE, or how many tokens
--   the pool has when that is not the base}; nil when the master has lost the lease, and nothing was changed.
--
-- This script runs for every iteration, so it makes one call for all listeners, and one a row: what APPEND answers tells
-- whether the base was right.
local engine, owner, term = ARGV[1], ARGV[2], ARGV[3]
if fenced(engine, owner, term) then
  return false
end
local claims = {}
for i = 5, #ARGV, 5 do
  claims[#claims + 1] = ARGV[i]
end
local listeners = #claims > 0 and call('HMGET', LISTENERS .. engine, unpack(claims)) or {}
local answers, packets, ended = { 0 }, {}, {}

-- Appends a row's tokens behind its base. Returns how many tokens the pool has when that is not the base.
local function append(id, base, tokens)
  local key, behind = TOKENS .. id, base * TOKEN_SIZE + #tokens
  if tokens == '' then
    return call('STRLEN', key) ~= behind and committed(id) or nil
  end
  local length = call('APPEND', key, tokens)
  if length == behind then
    return nil
  end
  local before = length - #tokens
  if before == 0 then
    call('DEL', key)
  else
    call('SET', key, call('GETRANGE', key, 0, before - 1))
  end
  return before / TOKEN_SIZE
end

for i = 4, #ARGV, 5 do
  local id, base, reason, tokens = ARGV[i], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local listener, answer = not ended[id] and listeners[(i + 1) / 5], COMMITTED.OK
  local count = listener and append(id, base, tokens)
  if not listener or (reason ~= '' and call('EXISTS', REQUEST .. id) == 0) then -- Redis may have evicted the record
    answer = COMMITTED.GONE
  elseif count then
    answer = count
  else
    local attempt, endpoint = listener:match('^(%d+) (.*)$')
    local finish = ''
    if base == 0 and tokens ~= '' then
      call('HSET', REQUEST .. id, 'first_token', int(now()))
    end
    if reason ~= '' then
      finish = end_record(id, reason, base + #tokens / TOKEN_SIZE)
      ended[id] = true
    end
    if endpoint ~= '' then
      local list = packets[endpoint]
      if not list then
        list = {}
        packets[endpoint] = list
      end
      list[#list + 1] = packet(id, attempt, base, tokens, finish)
    end
  end
  answers[#answers + 1] = answer
end
for endpoint, list in pairs(packets) do
  deliver(endpoint, engine, table.concat(list))
end
answers[1] = unhinted_needs(engine)
return answers
