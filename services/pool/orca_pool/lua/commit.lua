-- Commits what iterations made: appends its tokens, records the ends of requests, and writes one delivery entry for each
-- endpoint concerned.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, number of rows, then four for each row: claim number, request id, base (the index of its
--   first token), tokens in their binary form. Then four for each row that has more to say: number of the row, reason of the
--   request's end or '', tops of its tokens, logprobs of its prompt or ''.
-- Returns {slots that the head of the queue needs or 0, then two for each row that is not COMMITTED.OK: number of the row,
--   and COMMITTED.GONE, or how many tokens the pool has when that is not the base}; nil when the master has lost the lease,
--   and nothing was changed.
--
-- This script runs for every iteration, so it makes one call for all listeners, and one a row: what APPEND answers tells
-- whether the base was right.
local engine, owner, term, rows = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if fenced(engine, owner, term) then
  return false
end
local claims, more = {}, {}
for row = 1, rows do
  claims[row] = ARGV[4 * row + 1]
end
for i = 4 * rows + 5, #ARGV, 4 do
  more[tonumber(ARGV[i])] = { reason = ARGV[i + 1], tops = ARGV[i + 2], prompt = ARGV[i + 3] }
end
local listeners = rows > 0 and call('HMGET', LISTENERS .. engine, unpack(claims)) or {}
local answer, packets, ended, pack = { 0 }, {}, {}, struct.pack
local NOTHING = { reason = '', tops = '', prompt = '' } -- to say beside the tokens

-- Takes back tokens that were appended behind another base: `length` is what APPEND has answered. Returns how many tokens
-- the pool has.
local function take_back(key, tokens, length)
  local before = length - #tokens
  if before == 0 then
    call('DEL', key)
  else
    call('SET', key, call('GETRANGE', key, 0, before - 1))
  end
  return before / TOKEN_SIZE
end

for row = 1, rows do
  local i = 4 * row + 1
  local id, base, tokens, said = ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], more[row] or NOTHING
  local listener, key, count = listeners[row], TOKENS .. id, nil
  if ended[id] or (listener and said.reason ~= '' and call('EXISTS', REQUEST .. id) == 0) then
    listener = false -- Redis has evicted the record
  end
  if not listener then
    count = COMMITTED.GONE
  elseif tokens == '' then
    local length = call('STRLEN', key)
    count = length ~= base * TOKEN_SIZE and length / TOKEN_SIZE or nil
  else
    local length = call('APPEND', key, tokens)
    count = length ~= base * TOKEN_SIZE + #tokens and take_back(key, tokens, length) or nil
  end
  if count then
    answer[#answer + 1], answer[#answer + 2] = row, count
  else
    local finish, behind = '', ADDRESS_SIZE + #id
    if said.tops ~= '' then
      call('APPEND', TOPS .. id, said.tops)
    end
    if base == '0' and tokens ~= '' then
      call('HSET', REQUEST .. id, 'first_token', int(now()))
    end
    if base == '0' and said.prompt ~= '' then
      call('SET', PROMPT .. id, said.prompt)
    end
    if said.reason ~= '' then
      finish = end_record(id, said.reason, base + #tokens / TOKEN_SIZE)
      ended[id] = true
    end
    local endpoint = listener:sub(behind + 1)
    if endpoint ~= '' then
      local parts = packets[endpoint]
      if not parts then
        parts = {}
        packets[endpoint] = parts
      end
      local n = #parts
      parts[n + 1] = listener:sub(1, behind)
      parts[n + 2] = pack(CONTENT, base, #tokens / TOKEN_SIZE, #finish, #said.tops)
      parts[n + 3] = tokens
      if said ~= NOTHING then
        parts[n + 4], parts[n + 5] = finish, said.tops
      end
    end
  end
end
for endpoint, parts in pairs(packets) do
  deliver(endpoint, engine, table.concat(parts))
end
answer[1] = unhinted_needs(engine)
return answer
