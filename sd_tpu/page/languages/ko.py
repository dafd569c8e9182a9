"""The page in Korean."""

TEXTS = {
    "comma": ", ",
    # the prompts
    "heading": "프롬프트 여덟 개, 그림 여덟 장",
    "hint": "보고 싶은 것을 영어로 적어 보세요.",
    "details": "무엇을 그릴 수 있나요?",
    "skipped": "빈칸은 건너뜁니다.",
    "keys": "Ctrl+Enter로 생성하고 Esc로 중지합니다.",
    "prompt": "프롬프트",
    "prompt_placeholder": "비워 두면 건너뜁니다",
    "copy_first": "첫 프롬프트를 모두에 복사",
    "clear": "모두 지우기",
    "samples": "예시 프롬프트",
    "undo": "되돌리기",
    "redo": "다시 실행",
    "undone": "칸을 이전 상태로 되돌렸습니다.",
    "tokens": "토큰 {count} / {limit}",
    "tokens_lost": "{tokens}, 잘리는 부분: “{lost}”",
    "tokens_unknown": "{tokens}, 모르는 단어: “{words}”",
    "too_many_characters": "{count}자 (최대 {limit}자)",
    "list": "목록 붙여넣기",
    "list_label": "한 줄에 프롬프트 하나",
    "list_fill": "칸에 채우기",
    "list_empty": "목록이 비어 있습니다. 한 줄에 프롬프트를 하나씩 적어 주세요.",
    "list_filled": "목록을 칸에 채웠습니다.",
    "list_too_long": "목록의 프롬프트 {count}개 중 처음 {limit}개를 칸에 채웠습니다.",
    # a box's own settings
    "own_fold": "프롬프트 {number}의 개별 설정",
    "own_seed": "시드",
    "own_clear": "프롬프트 {number}의 개별 설정 지우기",
    "as_common": "공통 설정대로",
    "label_steps": "스텝 {value}",
    "label_guidance": "가이던스 {value}",
    "label_guidance_start": "가이던스 {value}부터",
    "label_guidance_stop": "가이던스 {value}까지",
    "label_cache_interval": "캐시 간격 {value}",
    "label_seed": "시드 {value}",
    "label_spacing_own": "간격: 모델 기본값",
    "label_negative": "제외: “{value}”",
    "label_negative_none": "네거티브 프롬프트 없음",
    # a comparison
    "compare": "비교",
    "compare_hint": "첫 프롬프트를 같은 시드로 최대 여덟 번 그리면서 매번 한 가지만 바꿉니다. "
                    "칸의 내용이 바뀝니다.",
    "compare_what": "바꿀 것",
    "compare_samplers": "샘플러 (최대 여덟 개)",
    "compare_values": "값 (최대 여덟 개)",
    "compare_go": "비교 그리기",
    # a picture that is read
    "read": "그림에서 불러오기",
    "read_label": "여기서 또는 A1111에서 만든 PNG",
    "read_done": "{file}의 프롬프트, 시드, 설정을 칸에 채웠습니다.",
    "read_size": "원래 크기: {width}×{height}, 여기서 만드는 크기: {here_width}×{here_height}.",
    "read_downsampling": "원래 토큰 다운샘플링: {there}, 여기: {here} "
                         "(페이지를 시작할 때 정해집니다).",
    # the settings
    "settings": "설정",
    "negative": "네거티브 프롬프트",
    "negative_help": "그림에 나오지 않았으면 하는 것입니다.",
    "steps": "스텝",
    "steps_help": "많을수록 오래 걸리고 더 다듬어집니다.",
    "guidance": "가이던스",
    "guidance_help": "높을수록 프롬프트를 더 엄격히 따릅니다. 1 이하이면 꺼집니다.",
    "sampler": "샘플러",
    "sampler_help": "노이즈를 그림으로 바꾸는 방법입니다.",
    "spacing": "간격",
    "spacing_help": "노이즈에 스텝을 나누는 방식입니다.",
    "faster_hint": "더 빠르지만 그림이 조금 달라집니다:",
    "guidance_start": "가이던스 시작",
    "guidance_start_help": "스텝의 이 비율 뒤에 시작합니다. 0이면 처음부터입니다.",
    "guidance_stop": "가이던스 끝",
    "guidance_stop_help": "스텝의 이 비율 뒤에 끝납니다. 1이면 끝까지입니다.",
    "cache_interval": "캐시 간격",
    "cache_interval_help": "1이면 꺼집니다. 3이면 세 번에 한 번만 전체를 계산합니다. 최대 10.",
    "exact_again": "정확한 그림으로 되돌리기",
    "own": "모델 기본값",
    "own_hint": "프롬프트 하나만 따로 설정할 수도 있습니다. 칸 아래의 슬라이더를 누르세요.",
    "own_value": "{value} (모델 기본값)",
    "size": "크기: {width}×{height}픽셀. 이 서버에 컴파일된 유일한 크기입니다.",
    "seed": "시드 (-1이면 새로 뽑기)",
    "seed_placeholder": "새 시드",
    "random": "무작위",
    "reuse": "이전 시드",
    "reuse_none": "다시 쓸 시드가 아직 없습니다. 먼저 그림을 생성하세요.",
    "generate": "생성",
    "stop": "중지",
    # drawing while somebody types
    "live": "라이브",
    "live_help": "프롬프트 입력을 멈추면 잠시 후 그 그림을 다시 그립니다.",
    # while it works
    "ready": "준비됨",
    "starting": "시작하는 중…",
    "making": "{count} 생성을 시작합니다.",
    "one_picture": "그림 1장",
    "pictures": "그림 {count}장",
    "compiling": "처음 한 번 컴파일하는 중…",
    "compiling_queued": "처음 한 번 컴파일하는 중… 대기 순서 {position}번.",
    "queued": "대기 순서 {position}번",
    "queued_wait": "대기 순서 {position}번, 시작까지 약 {time}",
    "step": "스텝 {step} / {steps}",
    "step_left": "스텝 {step} / {steps}, 약 {time} 남음",
    "seconds": "{count}초",
    "minutes": "{count}분",
    "done": "{seconds:.1f}초 만에 완료, 시드 {seed}",
    "stopped": "중지됨",
    "picture_ready": "그림 {places}번이 완성되었습니다.",
    "pictures_ready": "그림 {places}번이 완성되었습니다.",
    # the pictures
    "cell_waiting": "대기 중",
    "cell_forming": "그리는 중",
    "cell_stopped": "중지됨",
    "cell_seed": "시드 {seed}",
    "view": "그림 {number} 크게 보기: {prompt}",
    "labelled": "{label}: {prompt}",
    "again": "다시",
    "again_help": "다시: 그림 {number}의 프롬프트, 시드, 설정을 칸에 되돌립니다",
    "vary": "변형",
    "vary_help": "변형: 그림 {number}의 프롬프트를 모든 칸에 넣고 시드를 이어 갑니다",
    "png_help": "그림 {number}을 PNG로 내려받기",
    "again_done": "그림 {number}의 프롬프트, 시드, 설정을 칸에 채웠습니다.",
    "vary_done": "그림 {number}의 프롬프트를 모든 칸에 넣었습니다. 시드는 그 그림부터 이어집니다.",
    "zip": "모두 내려받기 (ZIP)",
    "grid": "한 장으로 내려받기",
    "link": "링크 복사",
    "link_copied": "링크가 복사됨",
    "link_prompt": "이 링크를 복사하세요:",
    "link_opened": "링크의 프롬프트, 시드, 설정을 칸에 채웠습니다.",
    "no_pictures": "아직 그림이 없습니다.",
    "gone": "그림이 더 이상 서버에 없습니다.",
    "viewer": "그림, 전체 화면",
    "previous": "이전 그림",
    "next": "다음 그림",
    "close": "닫기",
    "download_png": "PNG 내려받기",
    # the history
    "history": "기록",
    "history_empty": "아직 아무것도 없습니다. 만든 그림은 모두 여기에 남습니다.",
    "history_no_favourites": "아직 즐겨찾기가 없습니다. 그림의 별을 누르면 추가됩니다.",
    "history_only": "즐겨찾기만",
    "history_clear": "모두 삭제",
    "history_clear_sure": "기록의 모든 그림을 즐겨찾기까지 영구히 삭제할까요?",
    "history_more": "더 보기",
    "history_gone": "이 그림은 더 이상 기록에 없습니다.",
    "history_again": "사용",
    "history_again_help": "사용: “{prompt}”의 프롬프트, 시드, 설정을 칸에 채웁니다",
    "history_again_done": "그림의 프롬프트, 시드, 설정을 칸에 채웠습니다.",
    "history_view_help": "전체 화면으로 보기: “{prompt}”",
    "history_save": "PNG",
    "history_save_help": "“{prompt}” PNG로 내려받기",
    "history_favourite_help": "즐겨찾기: “{prompt}”",
    "history_delete_help": "삭제: “{prompt}”",
    "history_delete_sure": "이 그림을 영구히 삭제할까요?",
    "history_deleted": "그림을 삭제했습니다.",
    "history_cleared": "모든 그림을 삭제했습니다.",
    # the server
    "about": "서버 정보",
    "about_model": "모델",
    "about_devices": "장치",
    "about_precision": "정밀도",
    "about_downsampling": "토큰 다운샘플링",
    "about_sizes": "크기",
    "about_versions": "버전",
    "about_health": "상태",
    "sizes": "{width}×{height}, 컴파일됨",
    "no_tpu": "{devices}, TPU가 없어 조금 더 걸립니다",
    "healthy": "준비됨",
    "compiles": "컴파일하는 중",
}

SENTENCES = {
    "With these settings a picture takes about {seconds} s here; Live is for pictures that "
    "take {limit} s at most.":
        "여기서는 라이브를 사용할 수 없습니다. 이 설정의 예상 시간은 그림 한 장에 약 "
        "{seconds}초이며, 라이브의 한도는 {limit}초입니다.",
    # names of what is wrong, and whose it is
    " of prompt {number}": "프롬프트 {number}의 ",
    "Prompt {number}": "프롬프트 {number}",
    "Prompt {number}: ": "프롬프트 {number}: ",
    "The negative prompt{of}": "{of}네거티브 프롬프트",
    "Steps{of}": "{of}스텝",
    "Guidance{of}": "{of}가이던스",
    "Seed{of}": "{of}시드",
    "Guidance start{of}": "{of}가이던스 시작",
    "Guidance stop{of}": "{of}가이던스 끝",
    "Cache interval{of}": "{of}캐시 간격",
    "Guidance{of} should start before it stops, not start at {start} and stop at {stop}.":
        "{of}가이던스는 끝나기 전에 시작해야 합니다(입력: 시작 {start}, 끝 {stop}).",
    "Sampler": "샘플러",
    "Spacing": "간격",
    "Height": "높이",
    "Width": "너비",
    "a number as long as that": "그만큼 긴 수",
    # a request
    "There is no prompt yet: write what you would like to see in a box.":
        "아직 프롬프트가 없습니다. 보고 싶은 것을 칸에 적어 주세요.",
    "There are {count} prompts; at most {limit} fit.":
        "프롬프트가 {count}개입니다. 최대 {limit}개까지 가능합니다.",
    "The prompts should be a list of texts.": "프롬프트는 텍스트의 목록이어야 합니다.",
    "{name} should be text, not {kind}.": "{name}: 텍스트여야 합니다(입력: {kind}).",
    "{name} has {count} characters; at most {limit} are accepted.":
        "{name}: {count}자입니다. 최대 {limit}자까지 가능합니다.",
    "{name} should be a whole number, not {value}.": "{name}: 정수여야 합니다(입력: {value}).",
    "{name} should be a number, not {value}.": "{name}: 숫자여야 합니다(입력: {value}).",
    "{name} should be from {least} to {most}, not {value}.":
        "{name}: {least}에서 {most} 사이여야 합니다(입력: {value}).",
    "{name} {value}{of} is unknown; there are {known}.":
        "{of}{name} {value}: 알 수 없는 값입니다. 가능한 값: {known}.",
    "{sampler}{of} has no {spacing} spacing; it has {known}.":
        "{of}{sampler}: {spacing} 간격이 없습니다. 가능한 간격: {known}.",
    "Pictures of {width}x{height} were asked for; this server makes {here_width}x{here_height}.":
        "{width}×{height} 그림을 요청했지만 이 서버는 {here_width}×{here_height}만 만듭니다.",
    "What is filled in cannot be read; please load the page again.":
        "입력한 내용을 읽을 수 없습니다. 페이지를 다시 불러와 주세요.",
    "Unknown settings{of}: {names}.": "{of}알 수 없는 설정: {names}.",
    "The own settings should be a list, one of each prompt.":
        "개별 설정은 프롬프트마다 하나씩 있는 목록이어야 합니다.",
    "There are {count} own settings for {places} prompts.":
        "프롬프트는 {places}개인데 개별 설정은 {count}개입니다.",
    "The own settings{of} should be values by name, not {value}.":
        "{of}개별 설정은 이름별 값이어야 합니다(입력: {value}).",
    "The link cannot be read.": "링크를 읽을 수 없습니다.",
    # a comparison
    "There is nothing to compare yet: give up to {limit} values.":
        "비교할 값이 없습니다. 최대 {limit}개까지 적어 주세요.",
    "There are {count} values to compare; at most {limit} fit.":
        "비교할 값이 {count}개입니다. 최대 {limit}개까지 가능합니다.",
    # what a sampler cannot do
    "{whose}{reason}": "{whose}{reason}",
    "{sampler} takes 1 to {total} steps, not {steps}.":
        "{sampler}: 스텝은 1에서 {total} 사이여야 합니다(입력: {steps}).",
    "LCM takes at most {limit} steps here, not {steps}.":
        "LCM: 여기서는 스텝이 최대 {limit}입니다(입력: {steps}).",
    "{steps} steps are too many for {sampler} with {spacing} spacing: some of the {total} "
    "timesteps would repeat. Take fewer steps or another spacing.":
        "{spacing} 간격의 {sampler}에 {steps}스텝은 너무 많습니다. 타임스텝 {total}개 중 일부가 "
        "반복됩니다. 스텝을 줄이거나 다른 간격을 고르세요.",
    # a picture that is read
    "The file is larger than {limit} MiB.": "파일이 {limit} MiB보다 큽니다.",
    "The picture has far too many pixels.": "그림의 픽셀이 너무 많습니다.",
    "The file is not a PNG picture; no other kind carries settings here.":
        "PNG 그림이 아닙니다. 다른 형식에는 읽을 수 있는 설정이 없습니다.",
    "The file is not a whole PNG picture.": "온전한 PNG 그림 파일이 아닙니다.",
    "The picture carries no settings: its PNG has no 'parameters' text.":
        "그림에 설정이 들어 있지 않습니다. PNG에 ‘parameters’ 텍스트가 없습니다.",
    "The file cannot be read ({reason}).": "파일을 읽을 수 없습니다({reason}).",
    "The text is far too long to be a picture's settings.":
        "그림의 설정이라기에는 텍스트가 너무 깁니다.",
    "The text holds no picture settings: no line begins with 'Steps:'.":
        "텍스트에 그림의 설정이 없습니다. ‘Steps:’로 시작하는 줄이 없습니다.",
    "The picture's settings lack {names}.": "그림의 설정에 빠진 것이 있습니다: {names}.",
    "The picture's settings are garbled: {name}.": "그림의 설정이 깨져 있습니다: {name}.",
    "The picture's size should be like 512x512, not {value}.":
        "그림의 크기는 512x512와 같은 꼴이어야 합니다(입력: {value}).",
    # the server
    "The server is shutting down.": "서버가 종료되는 중입니다.",
    "Too many people are waiting; please try again in a minute.":
        "기다리는 사람이 너무 많습니다. 잠시 후 다시 시도해 주세요.",
    "The server failed; please try again.": "서버에 문제가 생겼습니다. 다시 시도해 주세요.",
    "Compiling failed: {reason}": "컴파일에 실패했습니다: {reason}",
    "Making the pictures failed: {reason}": "그림 생성에 실패했습니다: {reason}",
    # the history
    "{what} ({reason}).": "{what}({reason}).",
    "The history cannot be kept in {folder}": "{folder}에 기록을 보관할 수 없습니다",
    "The picture could not be added to the history": "그림을 기록에 추가하지 못했습니다",
    "The history cannot be read or changed": "기록을 읽거나 바꿀 수 없습니다",
    "An owner is a text of at least {least} random characters.":
        "소유자는 무작위 문자 {least}자 이상의 텍스트여야 합니다.",
}
