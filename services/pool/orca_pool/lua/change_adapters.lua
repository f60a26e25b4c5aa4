-- Changes which adapters are served beside the model.
--
-- KEYS: the pool hash.
-- ARGV: 'setting': the adapters that a setting names are these, and no others; 'load': this one more; 'replace': the same, or
--   another folder of it; 'unload': this one less; 'drop': the same, while it waits for an engine. Then names and folders in turn; of 'drop' the id, and ''.
-- Returns the ids of the adapters that are new, of 'load', 'replace' and 'unload' '' where the name is the setting's, or nothing
--   has it, of 'load' '=' where it is taken.
--
-- An entry is an adapter's name, folder, state, source ('setting' or 'load'), the moment `at` of its last change, and the
-- fingerprint of its files, '' until an engine has read them. It is `pending` until an engine has it, `current`, and then
-- `retired`: requests go on with it. Its id is the name with a number that was never given before.
local what, made = ARGV[1], {}
local entries, page = {}, call('HGETALL', ADAPTERS)
for i = 1, #page, 2 do
  entries[page[i]] = cjson.decode(page[i + 1])
end

local function write(id, entry, state)
  entries[id] = entry
  put_adapter(id, entry, state)
  call('HINCRBY', POOL, 'adapters', 1)
end

-- What no engine has ever had is forgotten at once: nothing can go on with it.
local function retire(id)
  if entries[id].print == '' then
    entries[id] = nil
    call('HDEL', ADAPTERS, id)
    call('HINCRBY', POOL, 'adapters', 1)
    call('HSET', POOL, 'shrunk', 0) -- requests may wait that name it: the sweep looks at the queue
    return
  end
  write(id, entries[id], 'retired')
end

-- Retires an adapter that has this name, in one of the states; nil: in all.
local function retire_named(name, state)
  for id, entry in pairs(entries) do
    if entry.name == name and entry.state ~= 'retired' and (not state or entry.state == state) then
      retire(id)
    end
  end
end

local function add(name, folder, source)
  retire_named(name, 'pending')
  local id = new_adapter_id(name)
  write(id, { name = name, folder = folder, source = source, print = '' }, 'pending')
  made[#made + 1] = id
end

-- The id of the newest adapter of a name that is not retired; nil without one.
local function newest(name)
  local found
  for id, entry in pairs(entries) do
    if entry.name == name and entry.state ~= 'retired' and (not found or entry.state == 'pending') then
      found = id
    end
  end
  return found
end

if what == 'setting' then
  local wanted = {}
  for i = 2, #ARGV, 2 do
    local name, folder = ARGV[i], ARGV[i + 1]
    local has = newest(name)
    wanted[name] = true
    if not has or entries[has].folder ~= folder or entries[has].source ~= 'setting' then
      add(name, folder, 'setting')
    end
  end
  for id, entry in pairs(entries) do
    if entry.source == 'setting' and entry.state ~= 'retired' and not wanted[entry.name] then
      retire(id)
    end
  end
  return made
end
local name, folder = ARGV[2], ARGV[3]
if what == 'drop' then
  if entries[name] and entries[name].state == 'pending' then
    retire(name)
  end
  return made
end
local has = newest(name)
if has and entries[has].source == 'setting' or (what == 'unload' and not has) then
  return { '' }
elseif what == 'load' and has then
  return { '=' }
elseif what == 'unload' then
  retire_named(name)
else
  add(name, folder, 'load')
end
return made
