-- Puts requests into the queue and attaches their calls. A known request with the same body is only attached.
--
-- KEYS: the pool hash.
-- ARGV: for each request its id, record, digest of the body, max_tokens (input and new tokens: slots that it fills at the
--   end), slots that must be free for it to begin, microseconds until its deadline or '', detach grace (microseconds),
--   endpoint, attempt, new tokens, tenant, microseconds that its class adds to its arrival, the weight of its tenant or ''
--   (the order is by arrival), its class (0 where shares are fair), keys of its prompt's last full blocks (8 bytes each; ''
--   where its prefix is not to be found), the id of its adapter or '', then the limits, '' for none: requests in the queue, their bytes, the tenant's
--   requests (waiting or claimed), its slots in the queue. Requests whose tenant is '' have no share of the queue. The record is '' where Redis has no
--   memory left: then a known request is attached, and a new one refused.
-- Returns for each request what `attach` of prelude.lua returns (without the record, where the request is new: its endpoint
--   has it), a number of REFUSAL, or {a number of REFUSAL, microseconds until the request would begin if it were in the
--   queue, microseconds until what it lacks is due, the limit of its tenant, what that counts}, '' for what is not known;
--   or the error of its record alone.
local MOST_TAGS = 65536 -- of tenants; those who used least are forgotten
local ONE, SEVERAL = '1', '+' -- before the id of a request whose prompt ends like no other, or the last of several
local MARGIN = 1.15 -- a prediction is an estimate, and what it promises must hold

-- A limit that may be ''.
local function limit_of(given)
  return tonumber(given) or math.huge
end

-- The least order among the requests that run and wait; nil where there is no request.
local function least_order()
  local found = call('ZRANGE', WAITING, 0, 0, 'WITHSCORES')[2]
  for _, engine in ipairs(call('ZRANGE', ENGINES, 0, -1)) do
    local order = call('ZRANGE', CLAIMED .. engine, 0, 0, 'WITHSCORES')[2]
    if order and (not found or tonumber(order) < tonumber(found)) then
      found = order
    end
  end
  return tonumber(found)
end

-- The order of a tenant's next request where shares are fair, and its tag behind that: start-time fair queueing, in
-- thousandths of a token, over what the request is expected to use. A tenant that had nothing here begins at the least
-- order of all: what it did not use before is not its own any more (VTC of Sheng et al., 2401.00588, lifts it so). Each
-- request moves that on by the least there is: so tenants that come at one time begin in the order in which they came, and
-- those that come later do not pass by one that waits without end.
local function fair_order(tenant, weight, new, max_tokens)
  local virtual = math.max((tonumber(call('HGET', POOL, 'virtual')) or now()) + 1, least_order() or 0)
  local length = tonumber(call('HGET', POOL, 'length')) or 1
  local start = math.max(virtual, tonumber(call('ZSCORE', TAGS, tenant)) or 0)
  return start, virtual, start + 1000 * (max_tokens - new + new * length) / weight
end

-- Of n things that are spread over m, the place of the k-th.
local function place(k, n, m)
  return math.ceil(math.min(k, n) * (m + 1) / (n + 1))
end

-- Where the request stood that a new one goes on from, and that engine: of those whose prompts are the beginning of its own,
-- the longest that an engine has still. '' for none. Prompts that end alike are no conversation: they tell nothing.
local function find_prefix(keys)
  for last = #keys, KEY_SIZE, -KEY_SIZE * LOOKED_AT do
    local page = {}
    for at = last, math.max(last - KEY_SIZE * (LOOKED_AT - 1), KEY_SIZE), -KEY_SIZE do
      page[#page + 1] = keys:sub(at - KEY_SIZE + 1, at)
    end
    for _, of in ipairs(call('HMGET', PREFIXES, unpack(page))) do
      local place = of and of:sub(1, 1) == ONE and call('HGET', REQUEST .. of:sub(2), 'place')
      local engine = place and engine_at(place)
      if engine then
        return place, engine
      end
    end
  end
  return ''
end

-- Notes a new request as the one whose prompt ends with its last key, or as the last one of several. Returns the engine that
-- it waits for; nil for none.
local function note_prefix(id, keys)
  local mark = keys:sub(-KEY_SIZE)
  local place, engine = find_prefix(keys)
  call('HSET', REQUEST .. id, 'mark', mark, 'prefix_at', place, 'overtaken', '0')
  call('HSET', PREFIXES, mark, (call('HEXISTS', PREFIXES, mark) == 1 and SEVERAL or ONE) .. id)
  return engine
end

local function submit(id, record, body_digest, max_tokens, upfront, deadline_in, grace, endpoint, attempt, new, tenant, lift,
  weight, class, keys, adapter, max_waiting, max_bytes, max_requests, max_queued)
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
  if adapter ~= '' and adapter_lost(adapter) then
    return REFUSAL.NO_ADAPTER
  end
  local time, ahead = now(), call('ZCARD', WAITING)
  local arrival = number(call('HGET', POOL, 'arrival'))
  local order, virtual, tag = arrival + lift
  if weight ~= '' then
    order, virtual, tag = fair_order(tenant, weight, new, max_tokens)
  end
  local tokens, slots, bytes, requests, queued, own, own_bytes = fields(LOAD, 'tokens', 'slots', 'bytes',
    'requests:' .. tenant, 'tokens:' .. tenant, 'waiting:' .. tenant, 'bytes:' .. tenant)
  tokens, slots, bytes = tonumber(tokens) or 0, tonumber(slots) or 0, tonumber(bytes) or 0
  requests, queued = tonumber(requests) or 0, tonumber(queued) or 0
  own, own_bytes = tonumber(own) or 0, tonumber(own_bytes) or 0
  local wait, soonest, each, width = prediction(ahead, tokens, slots + upfront, time) -- behind all that wait
  local before, own_wait = call('ZCOUNT', WAITING, '-inf', int(order)), wait
  if before < ahead then
    local part = before / ahead
    own_wait = prediction(before, tokens * part, slots * part + upfront, time)
  end
  local makes_room = yielding_to(upfront, class, order)
  if makes_room and before == 0 then
    own_wait = own_wait and 0
  end

  -- When the first request that makes room, and so many after it, will have done so.
  local function after(others)
    local mean = ahead > 0 and tokens / ahead or tonumber(new) -- tokens of a request
    return wait and soonest + math.max(others, 0) * mean * each
  end

  -- When so many of the `ahead` in the queue will have begun.
  local function begun(count)
    return wait and math.min(after(math.min(math.ceil(count), ahead) - 1), wait)
  end

  -- A refusal, with the wait of the whole queue and with the moment at which what the request lacks is due. limit: of the
  -- tenant, in such things.
  local function refused(why, due, limit, things)
    return { why, wait and int(wait) or '', due and int(due) or '', limit and int(limit) or '', things or '' }
  end

  if requests + 1 > limit_of(max_requests) then
    return refused(REFUSAL.TENANT_FULL, after(place(1, requests, math.max(ahead + (width or 0), requests)) - 1),
      max_requests, 'requests')
  end
  if queued + max_tokens > limit_of(max_queued) then
    local size = math.max(slots / math.max(ahead, 1), 1) -- slots of a request that waits
    local many = math.ceil((queued + max_tokens - max_queued) / size)
    return refused(REFUSAL.TENANT_FULL, begun(place(many, math.ceil(queued / size), ahead)), max_queued, 'slots')
  end
  if ahead >= limit_of(max_waiting) then
    return refused(REFUSAL.FULL, begun(ahead - max_waiting + 1))
  end
  if bytes + #record > limit_of(max_bytes) then
    return refused(REFUSAL.FULL, begun((bytes + #record - max_bytes) / math.max(bytes / math.max(ahead, 1), 1)))
  end
  -- A tenant has no more in the queue than is free in it. So the last one that comes still finds room, however many others
  -- have all that they may; who is alone may have half of it.
  if tenant ~= '' then
    local free, free_bytes = limit_of(max_waiting) - ahead, limit_of(max_bytes) - bytes
    if own >= free then
      return refused(REFUSAL.SHARE_FULL, begun(own - free + 1), free, 'requests')
    end
    if own_bytes >= free_bytes then
      local each = math.max(bytes / math.max(ahead, 1), 1)
      return refused(REFUSAL.SHARE_FULL, begun((own_bytes - free_bytes) / each + 1), free_bytes, 'bytes')
    end
  end
  -- What must wait is accepted only if it can still end in time. What need not wait keeps nobody from anything.
  if deadline_in ~= '' and own_wait and own_wait > 0 then
    local longest = deadline_in / MARGIN - new * each * width -- so long may a request wait that has so much time
    if own_wait > longest then
      return refused(REFUSAL.LATE, own_wait - math.max(longest, 0))
    end
  end
  call('HSET', POOL, 'arrival', int(arrival))
  if virtual then
    call('HSET', POOL, 'virtual', int(virtual))
    call('ZREMRANGEBYSCORE', TAGS, '-inf', int(virtual)) -- these tenants would begin there anyway
    call('ZADD', TAGS, int(tag), tenant)
    call('ZREMRANGEBYRANK', TAGS, 0, -MOST_TAGS - 1)
  end
  local deadline, tied = deadline_in == '' and '' or int(time + deadline_in), adapter == '' and '' or '/' .. adapter
  call('HSET', key, 'record', record, 'digest', body_digest, 'max_tokens', max_tokens, 'grace', grace,
    'upfront', upfront, 'order', int(order), 'class', class, 'state', 'waiting', 'claim', '', 'engine', '',
    'endpoint', endpoint, 'attempt', attempt, 'closed', '0', 'losses', '0', 'loss_at', '-1', 'reason', '0', 'final', '0', 'deadline', deadline, 'detach_at', '',
    'engines', '', 'new', new, 'tenant', tenant, 'submitted', int(time), 'queued_at', int(time), 'taken_at', '0', 'claimed_at', '0', 'first_token', '0',
    'finished', '0', 'weights', tied)
  if adapter ~= '' then
    call('SADD', USES .. adapter, id)
  end
  call('ZADD', WAITING, int(order), id)
  add_load('tokens', new, 'slots', upfront, 'bytes', #record, 'tokens:' .. tenant, max_tokens,
    'requests:' .. tenant, 1, 'waiting:' .. tenant, 1, 'bytes:' .. tenant, #record)
  call('SADD', CALLS .. endpoint, id)
  if deadline ~= '' then
    set_due(id, deadline, '')
  end
  local only = keys ~= '' and note_prefix(id, keys)
  if not hint_waiting(upfront, tied, only) and makes_room then
    hint(makes_room, '')
  end
  return { '', before + 1, own_wait and int(own_wait) or '', 0, '', '', '', '', '', '0', '0', int(time), '0', '0', '0' }
end

return one_by_one(20, submit)
