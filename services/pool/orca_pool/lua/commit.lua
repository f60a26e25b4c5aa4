-- Commits what iterations made: appends its tokens, records the ends of requests, and writes one delivery entry for each
-- endpoint concerned.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, number of rows, then five for each row: request id, claim number, base (the index of its
--   first token), reason of the request's end or '', tokens in their binary form. Then three for each row whose request
--   asked for them: number of the row, tops of its tokens, logprobs of its prompt or ''.
-- Returns {slots that the head of the queue needs or 0, then for each row COMMITTED.OK, COMMITTED.GONE, or how many tokens
--   the pool has when that is not the base}; nil when the master has lost the lease, and nothing was changed.
--
-- This script runs for every iteration, so it makes one call for all listeners, and one a row: what APPEND answers tells
-- whether the base was right.
local engine, owner, term, rows = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if fenced(engine, owner, term) then
  return false
end
local claims, scores = {}, {}
for row = 1, rows do
  claims[row] = ARGV[5 * row + 1]
end
for i = 5 * rows + 5, #ARGV, 3 do
  scores[tonumber(ARGV[i])] = { ARGV[i + 1], ARGV[i + 2] }
end
local listeners = rows > 0 and call('HMGET', LISTENERS .. engine, unpack(claims)) or {}
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

-- Keeps what a request asked to know beside its tokens. Returns the tops of this row.
local function keep_scores(id, base, scored)
  if not scored then
    return ''
  end
  if scored[1] ~= '' then
    call('APPEND', TOPS .. id, scored[1])
  end
  if scored[2] ~= '' and base == 0 then
    call('SET', PROMPT .. id, scored[2])
  end
  return scored[1]
end

for row = 1, rows do
  local i = 5 * row
  local id, base, reason, tokens = ARGV[i], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local listener, answer = not ended[id] and listeners[row], COMMITTED.OK
  if listener and reason ~= '' and call('EXISTS', REQUEST .. id) == 0 then
    listener = false -- Redis has evicted the record
  end
  local count = listener and append(id, base, tokens)
  if not listener then
    answer = COMMITTED.GONE
  elseif count then
    answer = count
  else
    local attempt, endpoint = listener:match('^(%d+) (.*)$')
    local finish, tops = '', keep_scores(id, base, scores[row])
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
      list[#list + 1] = packet(id, attempt, base, tokens, finish, tops)
    end
  end
  answers[#answers + 1] = answer
end
for endpoint, list in pairs(packets) do
  deliver(endpoint, engine, table.concat(list))
end
answers[1] = unhinted_needs(engine)
return answers
